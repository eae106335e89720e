"""Numbers, and perhaps their context, to one vector per numerical field."""

from scalarlens.encoders.base import NumericalEncoder, ValueEncoder, build, encoders

__all__ = ["NumericalEncoder", "ValueEncoder", "build", "encoders"]
