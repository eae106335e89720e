"""Line charts as SVG text: enough for a report that opens anywhere, with nothing to install."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 52, 46


@dataclass
class Line:
    x: np.ndarray
    y: np.ndarray
    label: str = ""
    color: str = PALETTE[0]
    dashed: bool = False


@dataclass
class Panel:
    """One chart; `log_x` spaces the axis by powers of ten, `marks` draws ticks inside the bottom edge."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    marks: Sequence[float] = field(default_factory=tuple)

    def render(self) -> str:
        """The panel as an SVG group of WIDTH x HEIGHT."""
        xs = np.concatenate([self._place(line.x) for line in self.lines])
        ys = np.concatenate([line.y for line in self.lines])
        x_low, x_high, y_low, y_high = xs.min(), xs.max(), ys.min(), ys.max()
        pad = 0.06 * (y_high - y_low or 1.0)
        y_low, y_high = y_low - pad, y_high + pad

        def across(x: np.ndarray) -> np.ndarray:
            return LEFT + (x - x_low) / ((x_high - x_low) or 1.0) * (WIDTH - LEFT - RIGHT)

        def down(y: np.ndarray) -> np.ndarray:
            return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

        parts = [f'<text x="{LEFT}" y="18" class="title">{escape(self.title)}</text>']
        for value, label in self._x_ticks(x_low, x_high):
            x = across(np.array(value))
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" class="tick" text-anchor="middle">{label}</text>'
            )
        for value in _round_ticks(y_low, y_high):
            y = down(np.array(value))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="tick" text-anchor="end">{value:g}</text>')
        inside = [m for m in self._place(np.asarray(self.marks, dtype=float)) if x_low <= m <= x_high]
        for mark in inside:
            x, base = across(np.array(mark)), HEIGHT - BOTTOM
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base - 9}" y2="{base}" class="mark"/>')
        parts += [self._polyline(line, across, down) for line in self.lines]
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" class="axis">{escape(self.x_label)}</text>'
        )
        parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" class="axis">{escape(self.y_label)}</text>')
        return "\n".join([*parts, *self._legend()])

    def _place(self, x: np.ndarray) -> np.ndarray:
        return np.log10(np.maximum(x, 1e-300)) if self.log_x else x

    def _x_ticks(self, low: float, high: float) -> list[tuple[float, str]]:
        if not self.log_x:
            return [(value, f"{value:g}") for value in _round_ticks(low, high)]
        return [(float(power), f"{10.0**power:g}") for power in range(math.ceil(low), math.floor(high) + 1)]

    def _polyline(self, line: Line, across: object, down: object) -> str:
        points = zip(across(self._place(line.x)), down(line.y), strict=True)  # type: ignore[operator]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4" stroke-opacity="0.75"' if line.dashed else ""
        return f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"{dash}/>'

    def _legend(self) -> list[str]:
        parts = []
        left = LEFT
        for line in (line for line in self.lines if line.label):
            dash = ' stroke-dasharray="5 4"' if line.dashed else ""
            stroke = f'stroke="{line.color}" stroke-width="2"{dash}'
            parts.append(f'<line x1="{left}" x2="{left + 20}" y1="36" y2="36" {stroke}/>')
            parts.append(f'<text x="{left + 25}" y="40" class="tick">{escape(line.label)}</text>')
            left += 45 + 6 * len(line.label)
        return parts


STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1b1f24}"
    ".title{font-size:14px;font-weight:600}.axis{font-size:12px;text-anchor:middle}.tick{font-size:11px;fill:#57606a}"
    ".grid{stroke:#d8dee4;stroke-width:0.6}.mark{stroke:#1b1f24;stroke-width:1.2}"
)


def figure(panels: Sequence[Panel], description: str) -> str:
    """Panels side by side as one SVG document on a white ground."""
    width = WIDTH * len(panels)
    groups = "\n".join(
        f'<g transform="translate({WIDTH * i} 0)">{panel.render()}</g>' for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" role="img">'
        f"<title>{escape(description)}</title><style>{STYLE}</style>"
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>\n{groups}\n</svg>\n'
    )


def _round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two others."""
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    while (high - low) / step < 4:
        step /= 2
    return [float(f"{index * step:.12g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
