"""A picture of text that arrives over time, as SVG."""

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 60, 90
_TICKS = 10


def svg(title: str, begin: float, arrivals: Sequence[tuple[float, int]], note: str) -> str:
    """`arrivals`: seconds and how many characters came then, in order; `begin`: where the time axis begins, seconds.
    The curve is the sum so far; each stroke below it is one arrival."""
    seconds = arrivals[-1][0] - begin
    total = sum(size for _, size in arrivals)
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    floor = _TOP + plot_height

    def x(at: float) -> float:
        return _LEFT + (at - begin) / seconds * plot_width

    def y(size: float) -> float:
        return floor - size / total * plot_height

    steps, strokes, so_far = [f"M{_LEFT} {floor}"], [], 0
    for at, size in arrivals:
        so_far += size
        steps.append(f"H{x(at):.1f}V{y(so_far):.1f}")
        strokes.append(f"M{x(at):.1f} {floor + 8}v12")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="16">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="46" fill="#666">{escape(note)}</text>',
    ]
    for second in range(0, int(seconds) + 1, max(1, round(seconds / _TICKS))):
        place = x(begin + second)
        parts.append(f'<path d="M{place:.1f} {_TOP}V{floor}" stroke="#ddd"/>')
        parts.append(f'<text x="{place:.1f}" y="{floor + 40}" text-anchor="middle">{second} s</text>')
    for part in range(5):
        size = total * part // 4
        parts.append(f'<path d="M{_LEFT} {y(size):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(size) + 4:.1f}" text-anchor="end">{size:,}</text>')
    parts += [
        f'<path d="{"".join(strokes)}" stroke="#b5541c" stroke-width="0.6"/>',
        f'<path d="{"".join(steps)}" stroke="#1c6bb5" stroke-width="2" fill="none"/>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 16}" fill="#666">Curve: characters of the arguments so far. Strokes: one for '
        "each delta. Time since the call's name.</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
