"""What is cached of which contexts, as a tree whose edges are runs of blocks."""

import time
from dataclasses import dataclass, field

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoints
from services.engine.cache.owners import Owner, Owners
from services.engine.mailbox import Sight
from services.protocol.events import CachedRun, Tier
from services.protocol.hashing import BLOCK_TOKENS, HASH_BYTES, BlockHash


@dataclass(slots=True)
class _Node:
    """One block, on the device or given up there and in the kvstore, perhaps."""

    name: BlockHash
    parent: BlockHash
    depth: int
    session: str
    device: bool = False
    held: bool = False
    host: bool = False
    shared: bool = False
    idle: float = 0.0
    children: list["_Node"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Forest:
    """The contexts that one scheduler's books tell of."""

    pool: BlockPool
    checkpoints: Checkpoints
    owners: Owners
    page_bytes: int
    state_bytes: int

    def sight(self) -> Sight:
        runs = _runs(self.pool, self.checkpoints, self.owners)
        return Sight(runs, self.page_bytes, self.state_bytes if self.checkpoints.size else 0)


def _runs(pool: BlockPool, checkpoints: Checkpoints, owners: Owners) -> tuple[CachedRun, ...]:
    """Parents before their children, what was used last before its siblings. A run ends where contexts part, and where
    another session was the last to use what follows. O(blocks)."""
    nodes = _nodes(pool)
    roots: list[_Node] = []
    for node in nodes.values():
        parent = nodes.get(node.parent)
        (roots if parent is None else parent.children).append(node)
    marks: dict[BlockHash, list[tuple[int, Tier]]] = {}
    for checkpoint in checkpoints.known_all():
        tier: Tier = "device" if checkpoint.slot >= 0 else "host"
        marks.setdefault(checkpoint.mark.block, []).append((checkpoint.mark.position, tier))
    runs: list[CachedRun] = []
    waiting = [(root, b"") for root in sorted(roots, key=lambda node: -node.idle)]
    while waiting:
        first, parent_run = waiting.pop()
        blocks = [first]
        while len(last_children := blocks[-1].children) == 1 and last_children[0].session == first.session:
            blocks.append(last_children[0])
        last = blocks[-1]
        runs.append(_run(blocks, parent_run, marks, owners.known(first.session)))
        waiting += [(child, last.name) for child in sorted(last.children, key=lambda node: -node.idle)]
    return tuple(runs)


def _nodes(pool: BlockPool) -> dict[BlockHash, _Node]:
    """By name. Of what left the device only that whose parents are known up to a root or a block that is here."""
    now, wall = pool.now(), time.time()
    nodes: dict[BlockHash, _Node] = {}
    for page in pool.pages():
        block = page.block
        if not block.tail:
            session = "" if page.owner is None else page.owner.session
            nodes[block.name] = _Node(
                block.name,
                block.parent,
                block.depth,
                session,
                device=True,
                held=page.held,
                host=page.stored,
                shared=page.shared,
                idle=now - page.last_use,
            )
    for name, departure in pool.gone.in_store():
        if name not in nodes and len(name) == HASH_BYTES:  # and not a checkpoint's
            nodes[name] = _Node(
                name,
                departure.parent,
                departure.depth,
                departure.session,
                host=True,
                idle=wall - departure.when,
            )
    return nodes


def _run(
    blocks: list[_Node], parent: BlockHash, marks: dict[BlockHash, list[tuple[int, Tier]]], owner: Owner | None
) -> CachedRun:
    first, last = blocks[0], blocks[-1]

    def tokens(kept: list[bool]) -> int:
        return BLOCK_TOKENS * sum(kept)

    return CachedRun(
        name=last.name,
        parent=parent,
        start=first.depth * BLOCK_TOKENS,
        tokens=len(blocks) * BLOCK_TOKENS,
        device=tokens([block.device for block in blocks]),
        held=tokens([block.held for block in blocks]),
        host=tokens([block.host for block in blocks]),
        checkpoints=tuple(sorted(mark for block in blocks for mark in marks.get(block.name, ()))),
        session_id=last.session,
        standing="idle" if owner is None else owner.standing,
        shared=any(block.shared for block in blocks),
        idle_seconds=max(0.0, min(block.idle for block in blocks)),
    )
