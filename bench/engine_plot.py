"""Decode over depth as a picture: a panel for each batch, a line for each format, and dashed what the copy bandwidth
allows."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_NAME = re.compile(r"decode/([^/]+)/depth(\d+)/batch(\d+)")
_COLOURS = ("#1c6bb5", "#b5541c", "#2f8f4e", "#8a4fb0", "#666666", "#c0392b", "#16868b", "#946c00")
_WIDTH, _HEIGHT = 440, 300
"""Of a panel."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 46, 40
_HEAD, _COLUMNS, _TICKS = 64, 2, 4


def svg(title: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """Of entries as `bench.results` writes them; those of other names are left out. Raises ValueError where none is
    left."""
    panels: dict[int, dict[str, list[tuple[int, float, float | None]]]] = {}
    for entry in entries:
        if match := _NAME.fullmatch(entry["name"]):
            lines = panels.setdefault(int(match[3]), {})
            lines.setdefault(match[1], []).append((int(match[2]), entry["value"], entry["limit"]))
    if not panels:
        raise ValueError("no decode was measured")
    formats = list(dict.fromkeys(format for lines in panels.values() for format in lines))
    colours = {format: _COLOURS[index % len(_COLOURS)] for index, format in enumerate(formats)}
    rows = -(-len(panels) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, _HEAD + rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="16">{escape(title)}</text>',
    ]
    place = _LEFT
    for format, colour in colours.items():
        parts.append(f'<path d="M{place} 44h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{place + 23}" y="48">{escape(format)}</text>')
        place += 40 + 7 * len(format)
    for index, (batch, lines) in enumerate(sorted(panels.items())):
        x, y = index % _COLUMNS * _WIDTH, _HEAD + index // _COLUMNS * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(batch, lines, colours)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    batch: int, lines: Mapping[str, Sequence[tuple[int, float, float | None]]], colours: Mapping[str, str]
) -> str:
    depths = sorted({depth for points in lines.values() for depth, _, _ in points})
    top = _round(max(max(value, limit or 0.0) for points in lines.values() for _, value, limit in points))
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    low, high = math.log(depths[0]), math.log(depths[-1])

    def x(depth: int) -> float:
        return _LEFT + ((math.log(depth) - low) / (high - low) if high > low else 0.5) * (right - _LEFT)

    def y(value: float) -> float:
        return floor - value / top * (floor - _TOP)

    parts = [
        f'<text x="{_LEFT}" y="32">{batch} at once: tokens/s over tokens of context (dashed: copy bandwidth)</text>'
    ]
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    for depth in depths:
        parts.append(f'<text x="{x(depth):.1f}" y="{floor + 18}" text-anchor="middle">{depth / 1024:g}K</text>')
    for format, points in lines.items():
        colour = colours[format]
        ordered = sorted(points)
        path = " ".join(f"{x(depth):.1f},{y(value):.1f}" for depth, value, _ in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(depth):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for depth, value, _ in ordered
        ]
        limits = " ".join(f"{x(depth):.1f},{y(limit):.1f}" for depth, _, limit in ordered if limit is not None)
        if limits:
            parts.append(f'<polyline points="{limits}" fill="none" stroke="{colour}" stroke-dasharray="4 4"/>')
    return "".join(parts)


def _round(value: float) -> float:
    """Up, to a number whose quarters are short."""
    unit = 10 ** math.floor(math.log10(value))
    return next(step * unit for step in (1.2, 1.6, 2, 3, 4, 6, 8, 10) if step * unit >= value)
