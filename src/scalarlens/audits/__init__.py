"""Questions put to a trained artifact, one file each."""

from scalarlens.audits.base import Audit, Finding, Report, audits, run_audits
from scalarlens.audits.subject import Subject, open_subject

__all__ = ["Audit", "Finding", "Report", "Subject", "audits", "open_subject", "run_audits"]
