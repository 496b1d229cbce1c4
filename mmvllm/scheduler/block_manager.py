"""KV blocks: allocated, shared by content, freed. (Paged KV caches are arXiv 2309.06180.)

A full block of computed tokens enters the prefix cache under a key that *is* its content: the id of the prefix before
it, its token ids, and for each media item it touches the item's digest and where in the item the block begins (all
placeholders share one token id, so token ids alone would let one image's KV be used for another). A lookup compares
whole keys, so a hit never rests on a hash alone. The first block's prefix is the request's cache salt
and the digest of its LoRA adapter.

A block whose reference count falls to zero is free but keeps its content until it is needed: free blocks are a queue,
those without content at the front, then the least recently used; of one sequence the tail goes before the head.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

from mmvllm.scheduler.sequence import Sequence


class BlockManager:
    """Owns `block_table` and `prefix_ids` of every sequence. Nothing here touches device memory."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[tuple, tuple[int, int]] = {}  # content key -> (block, id of the prefix that ends with it)
        self.keys: dict[int, tuple] = {}  # the same, by block
        self._next_prefix_id = count()

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def attach_prefix(self, seq: Sequence) -> int:
        """Give a sequence without blocks the longest cached prefix; return how many tokens that covers.

        What `num_skippable_tokens` leaves out is computed: at least the last token, because its logits are wanted.
        """
        assert not seq.block_table, f"sequence {seq.seq_id} already has blocks"
        if self.enable_prefix_caching:
            for i in range(seq.num_skippable_tokens // self.block_size):
                hit = self.cached.get(self._key(seq, i))
                if hit is None:
                    break
                block, prefix_id = hit
                self._take(block)
                seq.block_table.append(block)
                seq.prefix_ids.append(prefix_id)
        return len(seq.block_table) * self.block_size

    def fork(self, parent: Sequence, child: Sequence, covered: int) -> int:
        """Share the blocks of the parent's first `covered` tokens with the child, which has them too; return `covered`.

        The child computes the next token; the block it stands in is copied first, if the parent has it.
        """
        assert not child.block_table and covered <= parent.num_computed_tokens
        assert covered < child.num_tokens, "the last token is computed again, because its logits are wanted"
        child.block_table = parent.block_table[: covered // self.block_size + 1]
        child.prefix_ids = parent.prefix_ids[: covered // self.block_size]
        for block in child.block_table:
            self._take(block)
        return covered

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]] | None:
        """Make the next `num_new_tokens` tokens of a sequence writable; None, and no change, if blocks are short.

        Returns the (source, destination) block copies to make before writing: blocks shared with another sequence are
        copied on write.
        """
        start = seq.num_computed_tokens + seq.num_inflight_tokens
        end = start + num_new_tokens
        table = seq.block_table
        written = range(start // self.block_size, min(len(table), -(-end // self.block_size)))
        shared = [i for i in written if self.ref_counts[table[i]] > 1]
        num_new_blocks = max(0, -(-end // self.block_size) - len(table))
        if len(shared) + num_new_blocks > len(self.free_blocks):
            return None
        copies = []
        for i in shared:
            source, table[i] = table[i], self._new_block()
            self._release(source)
            copies.append((source, table[i]))
        table.extend(self._new_block() for _ in range(num_new_blocks))
        return copies

    def commit(self, seq: Sequence) -> None:
        """Enter the sequence's newly computed full blocks into the prefix cache."""
        if not self.enable_prefix_caching:
            return
        for i in range(seq.num_cached_blocks, seq.num_computed_tokens // self.block_size):
            key, block = self._key(seq, i), seq.block_table[i]
            if key not in self.cached:  # else another block already holds this content
                self.cached[key] = block, next(self._next_prefix_id)
                self.keys[block] = key
            seq.prefix_ids.append(self.cached[key][1])

    def free(self, seq: Sequence) -> None:
        """Free all blocks of a sequence; their content stays cached until they are allocated again."""
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table, seq.prefix_ids = [], []

    def forget(self) -> None:
        """Empty the prefix cache; sequences keep their blocks."""
        self.cached, self.keys = {}, {}

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Assert that every block is free or owned, by exactly the sequences that say so, and that the cache agrees."""
        owners = [0] * self.num_blocks
        for seq in seqs:
            assert len(set(seq.block_table)) == len(seq.block_table), f"sequence {seq.seq_id} lists a block twice"
            assert len(seq.prefix_ids) <= len(seq.block_table)
            for block in seq.block_table:
                owners[block] += 1
        assert owners == self.ref_counts, f"reference counts {self.ref_counts}, owners {owners}"
        free = {block for block, owned in enumerate(owners) if not owned}
        assert free == set(self.free_blocks), f"free list {sorted(self.free_blocks)}, not owned {sorted(free)}"
        assert {block: key for key, (block, _) in self.cached.items()} == self.keys

    def _key(self, seq: Sequence, i: int) -> tuple:
        start, end = i * self.block_size, (i + 1) * self.block_size
        items = ()
        if start < seq.mm_end:
            items = tuple((seq.mm_items[j].digest, start - seq.mm_items[j].offset) for j in seq.mm_items_in(start, end))
        prefix = seq.prefix_ids[i - 1] if i else ("salt", seq.cache_salt, seq.adapter and seq.adapter.digest)
        return prefix, tuple(seq.token_ids[start:end]), items

    def _take(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            del self.free_blocks[block]
        self.ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        assert self.ref_counts[block] >= 0, f"block {block} released twice"
        if self.ref_counts[block] == 0:
            self.free_blocks[block] = None
            if block not in self.keys:
                self.free_blocks.move_to_end(block, last=False)

    def _new_block(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        self.ref_counts[block] = 1
        if key := self.keys.pop(block, None):
            del self.cached[key]
        return block
