"""What the machine allows: memory bandwidth, bytes that a step must read, and what a verifier's pass costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from safe_llm.backends.base import Feed
from safe_llm.backends.hf import HFBackend
from safe_llm.bench.workloads import Conversation
from safe_llm.member import Member

__all__ = ["PASS_TOKENS", "Ceiling", "MemberCost", "bytes_per_step", "measure_bandwidth", "measure_ceiling"]

PASS_TOKENS = (1, 6, 16)
"""Lengths of the passes that are timed: a step, a draft of five with the token before it, a long draft."""

_BUFFER_BYTES = {"cpu": 1 << 29, "cuda": 1 << 30}
"""Far above any cache."""
_READS = 5
_CONTEXT_TOKENS = 64
_REPEATS = 7

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCost:
    """What one member's passes cost.

    Attributes:
        member: Its name.
        device: Where it is, as far as known.
        bytes_per_step: Weights that a step reads; None where the member is no transformers model.
        bandwidth: Bytes per second that its device reads, or None as above.
        pass_s: Number of new tokens -> median seconds of a pass with the argmax of each.
        relative: Number of new tokens -> the same over the drafter's pass of one token (the c of R = tau / (n + c)).
    """

    member: str
    device: str | None
    bytes_per_step: int | None
    bandwidth: float | None
    pass_s: Mapping[int, float]
    relative: Mapping[int, float]

    @property
    def roofline(self) -> float | None:
        """Most tokens per second of this member alone: bandwidth over bytes per step."""
        if self.bytes_per_step is None or self.bandwidth is None:
            return None
        return self.bandwidth / self.bytes_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Of all members, the drafter first."""

    members: tuple[MemberCost, ...]


def measure_ceiling(
    members: Sequence[Member],
    prompt: Conversation,
    *,
    clock: Clock = time.perf_counter,
    buffer_bytes: int | None = None,
) -> Ceiling:
    """Measure the members, which take turns.

    Args:
        members: The drafter first.
        prompt: Its first ids are what the passes follow.
        clock: Seconds.
        buffer_bytes: Size of what is read for the bandwidth; by default far above any cache.
    """
    bandwidths: dict[torch.device, float] = {}
    for device in map(_device, members):
        if device is not None and device not in bandwidths:
            bandwidths[device] = measure_bandwidth(device, buffer_bytes=buffer_bytes, clock=clock)
    times = _pass_times(members, prompt, clock)
    step_s = times[members[0].name][1]
    return Ceiling(
        members=tuple(
            MemberCost(
                member=member.name,
                device=member.device,
                bytes_per_step=bytes_per_step(member),
                bandwidth=None if (device := _device(member)) is None else bandwidths[device],
                pass_s=times[member.name],
                relative={count: seconds / step_s for count, seconds in times[member.name].items()},
            )
            for member in members
        )
    )


def measure_bandwidth(
    device: torch.device, *, buffer_bytes: int | None = None, clock: Clock = time.perf_counter
) -> float:
    """Return the bytes per second of the fastest of several reads and copies of a large tensor."""
    size = buffer_bytes or _BUFFER_BYTES.get(device.type, _BUFFER_BYTES["cpu"])
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(buffer)
    best = 0.0
    for is_copy in [False, True] * _READS:
        started = clock()
        if is_copy:
            copy.copy_(buffer)
        else:
            buffer.sum()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, (1 + is_copy) * size / (clock() - started))
    return best


def bytes_per_step(member: Member) -> int | None:
    """Return the bytes of the weights that a step reads: all but an input embedding that is not the output's too.

    The cache, which grows with the text, is not among them; of a mixture of experts all count.
    """
    if not isinstance(member.backend, HFBackend):
        return None
    model = member.backend.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = [weights for weights in model.parameters() if weights is not embedding or weights is head]
    total: int = sum(weights.numel() * weights.element_size() for weights in read)
    return total


def _device(member: Member) -> torch.device | None:
    if not isinstance(member.backend, HFBackend):
        return None
    device: torch.device = member.backend.model.get_input_embeddings().weight.device
    return device


def _pass_times(members: Sequence[Member], prompt: Conversation, clock: Clock) -> dict[str, dict[int, float]]:
    """Return the median seconds by member and number of new tokens, after one round that is not counted."""
    longest = max(PASS_TOKENS)
    rows: list[tuple[Member, int, list[int]]] = []
    times: dict[tuple[str, int], list[float]] = {}
    try:
        for member in members:
            room = member.backend.max_context - longest
            ids = member.prompter.encode(prompt)[: max(1, min(_CONTEXT_TOKENS, room))]
            row = member.backend.open()
            rows.append((member, row, ids))
            member.backend.forward([Feed(row=row, ids=ids)])
        for number, count, (member, row, ids) in itertools.product(range(_REPEATS + 1), PASS_TOKENS, rows):
            new = list(itertools.islice(itertools.cycle(ids), count))
            started = clock()
            member.backend.forward([Feed(row=row, ids=new, keep=count)]).top1()  # on the host, so it has run
            seconds = clock() - started
            member.backend.rollback(row, len(ids))
            if number:
                times.setdefault((member.name, count), []).append(seconds)
    finally:
        for member, row, _ in rows:
            member.backend.close(row)
    return {member.name: {count: median(times[member.name, count]) for count in PASS_TOKENS} for member, _, _ in rows}
