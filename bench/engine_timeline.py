"""What runs on the GPU during some steps, as a picture: a lane for each kind of work, and one for the time in which
nothing runs."""

from collections.abc import Sequence
from html import escape

from bench.engine_trace import Launch

_LANES = (
    ("products, delta rule", ("stream", "by_row", "nvjet", "gemm", "cutlass"), "#1c6bb5"),
    ("attention", ("decode", "combine", "store", "prefill", "sigmoid_gated"), "#b5541c"),
    ("rest of delta net", ("convolve", "fold", "front", "chunk", "recompute"), "#2f8f4e"),
    ("draw", ("draw", "adjust"), "#c0392b"),
    ("others", ("",), "#8a8a8a"),
)
"""Name, beginnings of kernels' names, colour; the first that fits."""
_WIDTH, _LANE, _LEFT, _TOP = 1200, 26, 130, 64
_GAP = 3.0
"""Microseconds: shorter pauses between kernels are not drawn as such."""


def svg(title: str, launches: Sequence[Launch]) -> str:
    """In the order of their starts. Raises ValueError where there are none."""
    if not launches:
        raise ValueError("nothing was launched")
    begin = launches[0].start
    end = max(launch.start + launch.us for launch in launches)
    scale = (_WIDTH - _LEFT - 20) / (end - begin)
    paths: list[list[str]] = [[] for _ in (*_LANES, "idle")]
    busy_until, idle = begin, 0.0
    for launch in launches:
        paths[_lane(launch.name)].append(_bar(launch.start - begin, launch.us, scale))
        if launch.start - busy_until > _GAP:
            idle += launch.start - busy_until
            paths[-1].append(_bar(busy_until - begin, launch.start - busy_until, scale))
        busy_until = max(busy_until, launch.start + launch.us)
    height = _TOP + _LANE * len(paths) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="10" y="44" fill="#666">Nothing runs for {idle / (end - begin):.1%} of the '
        f"{(end - begin) / 1e3:.2f} ms, counting pauses above {_GAP:g} us.</text>",
    ]
    names, colours = [*(lane[0] for lane in _LANES), "nothing"], [*(lane[2] for lane in _LANES), "#000"]
    for index, (name, colour) in enumerate(zip(names, colours, strict=True)):
        y = _TOP + index * _LANE
        parts.append(f'<text x="10" y="{y + 16}">{name}</text>')
        parts.append(f'<path transform="translate({_LEFT} {y})" fill="{colour}" d="{"".join(paths[index])}"/>')
    floor = _TOP + _LANE * len(paths)
    for tick in range(0, int((end - begin) / 1e3) + 1, max(1, int((end - begin) / 1e4))):
        x = _LEFT + tick * 1e3 * scale
        parts.append(f'<path d="M{x:.1f} {_TOP}V{floor}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{tick} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lane(name: str) -> int:
    return next(index for index, (_, kinds, _) in enumerate(_LANES) if name.startswith(kinds))


def _bar(start: float, us: float, scale: float) -> str:
    return f"M{start * scale:.2f} 3h{max(us * scale, 0.05):.2f}v20h-{max(us * scale, 0.05):.2f}z"
