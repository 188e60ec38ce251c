"""What every backend asks of the feeds of a pass."""

from __future__ import annotations

from collections.abc import Sequence

from safe_llm.backends.base import Backend, Feed
from safe_llm.errors import ContextOverflowError, MemberError

__all__ = ["check_feeds"]


def check_feeds(backend: Backend, feeds: Sequence[Feed], *, num_ids: int) -> None:
    """Raise, before anything changes, if the feeds cannot be appended.

    Args:
        backend: What has their rows.
        feeds: The feeds of one pass.
        num_ids: Ids below it can be fed; others would end the process, or its use of a GPU.

    Raises:
        ValueError: No feed, a row twice, or a wrong `keep`.
        ContextOverflowError: A row would exceed the context.
        MemberError: An id is out of range.
    """
    if not feeds or len({feed.row for feed in feeds}) != len(feeds):
        raise ValueError("forward needs at least one feed, and a row at most once")
    for feed in feeds:
        if not 1 <= feed.keep <= len(feed.ids):
            raise ValueError(f"keep must be 1 to {len(feed.ids)}, got {feed.keep}")
        length = backend.length(feed.row) + len(feed.ids)
        if length > backend.max_context:
            raise ContextOverflowError(backend.name, length, backend.max_context)
        if min(feed.ids) < 0 or max(feed.ids) >= num_ids:
            raise MemberError(
                backend.name,
                f"an id is outside of its vocabulary of {num_ids}",
                hint="its tokenizer does not belong to its weights",
            )
