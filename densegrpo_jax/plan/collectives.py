"""Collectives in the text of a compiled program: what chips receive from each other, through all of its loops."""

import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
CALLS = ("calls", "to_apply", "condition", "body", "branch_computations", "called_computations")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def received(program: str) -> dict[str, tuple[int, int]]:
    """Collectives in the text of a compiled program: kind -> how often they run, and bytes that a chip receives in them, by
    rings. Loops are counted through.

    Raises:
      ValueError: a loop whose number of rounds, or a collective whose groups the text does not say.
    """
    bodies = _computations(program)
    runs = _runs(bodies)
    seen: dict[str, tuple[str, int, float]] = {}  # by channel, as the start and the end of one may both be written with it
    for name, lines in bodies.items():
        for i, line in enumerate(lines):
            if found := re.search(rf"= (\(?[^=]*?) ({'|'.join(KINDS)})(-start)?\(", line):
                channel = re.search(r"channel_id=(\d+)", line)
                key = channel[1] if channel else f"{name} {i}"
                one = found[2], runs[name], _received(line, *found.groups())
                seen[key] = max(seen.get(key, ("", 0, 0.0)), one, key=lambda one: one[1])
    result: dict[str, tuple[int, int]] = {}
    for kind, times, size in seen.values():
        number, total = result.get(kind, (0, 0))
        result[kind] = number + times, total + round(times * size)
    return {kind: counts for kind, counts in result.items() if counts[0]}


def _received(line: str, result: str, kind: str, start: str | None) -> float:
    """Bytes that a chip receives in one collective, from its result's type and its groups."""
    arrays = [found for found in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result) if found != ("u32", "")]  # which are counters
    size = sum(BYTES.get(dtype, 4) * math.prod(int(n) for n in sides.split(",") if n) for dtype, sides in arrays)
    if kind == "collective-permute":
        return size / 2 if start else size  # what is started has its operand in its type too
    n = _members(line)
    if kind == "all-gather" and start:
        size = size * n / (n + 1)
    return size * {"all-gather": (n - 1) / n, "all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "all-to-all": (n - 1) / n}[kind]


def _members(line: str) -> int:
    """Chips in a group of a collective."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    raise ValueError(f"a collective of a compiled program does not say its groups: {line.strip()[:300]}")


def _computations(program: str) -> dict[str, list[str]]:
    """The lines of each computation of a program's text, callees before callers."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if head := re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = bodies.setdefault(head[1], [])
        else:
            lines.append(line)
    return bodies


def _runs(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in one run of the last."""
    runs = dict.fromkeys(bodies, 0)
    runs[list(bodies)[-1]] = 1
    for name in reversed(bodies):
        for line in bodies[name]:
            rounds = _rounds(line, bodies) if " while(" in line else 1
            for called in re.findall(rf"(?:{'|'.join(CALLS)})=(\{{[^}}]*\}}|%?[\w.\-]+)", line):
                for callee in re.findall(r"[\w.\-]+", called):
                    if callee in runs:
                        runs[callee] += rounds * runs[name]
    return runs


def _rounds(loop: str, bodies: dict[str, list[str]]) -> int:
    """Rounds of a loop: as the compiler notes them, or the constant that its condition compares with."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop):
        return int(noted[1])
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", loop)[1]]
    constants = dict(re.findall(r"%?([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)", "\n".join(condition)))
    compared = [re.search(r"ROOT .* compare\(([^)]*)\), direction=LT", line) for line in condition]
    ends = [constants[name] for found in compared if found for name in re.findall(r"[\w.\-]+", found[1]) if name in constants]
    if len(ends) != 1:
        raise ValueError(f"a loop of a compiled program does not say how many rounds it has: {loop.strip()[:200]}")
    return int(ends[0])
