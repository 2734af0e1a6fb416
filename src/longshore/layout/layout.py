"""Layout of the parameters of one optimizer over ranks: which are reduced together, and which elements a rank steps."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from longshore.layout.divisions import Bucket, Division
from longshore.layout.tiles import Range, Spec


@dataclass(frozen=True)
class Layout:
    """Parameters and their buckets, as one rank sees them.

    Attributes:
        division: how buckets are divided over ranks.
        bucket_numel: maximal number of elements in a bucket.
        specs: all parameters by their index, which is the key of each, in the order in which they were added.
        buckets: in the order of their index.
        checksum: of all that ranks have to have in common.
    """

    division: Division = field(compare=False)
    bucket_numel: int
    specs: Mapping[int, Spec] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    checksum: int = 0

    def extended(self, specs: Iterable[Spec]) -> Layout:
        """Return this layout with more parameters, in new buckets.

        Raises:
            ValueError: see :meth:`Division.buckets`.
        """
        added = {spec.key: spec for spec in specs}
        if not added:
            return self
        first_key = self.buckets[-1].next_key if self.buckets else 0
        more = self.division.buckets(added.values(), self.bucket_numel, len(self.buckets), first_key)
        checksum = zlib.crc32(repr(list(added.values())).encode(), self.checksum)
        return replace(self, specs={**self.specs, **added}, buckets=self.buckets + more, checksum=checksum)

    @functools.cached_property
    def bucket_of(self) -> Mapping[int, Bucket]:
        """The bucket of each parameter; one without elements is in none."""
        return {member.parameter: bucket for bucket in self.buckets for member in bucket.members}

    @functools.cached_property
    def ranges(self) -> Mapping[int, Range]:
        """The ranges that this rank steps, by their key."""
        return {owned.key: owned for bucket in self.buckets for owned in bucket.owned}

    @functools.cached_property
    def _owned(self) -> Mapping[int, list[Range]]:
        found: dict[int, list[Range]] = {}
        for owned in self.ranges.values():
            found.setdefault(owned.parameter, []).append(owned)
        return found

    def owned(self, parameter: int) -> Sequence[Range]:
        """Return the ranges of a parameter that this rank steps: one at most, except at stage 0."""
        return self._owned.get(parameter, ())

    def stepped_by_rank(self, parameter: int) -> list[int]:
        """Return how many elements of a parameter each rank steps."""
        return self.division.stepped_by_rank(parameter, self.bucket_of.get(parameter))

    def most_stepped(self, parameter: int) -> int:
        """Return the most elements of a parameter that any rank steps."""
        bucket = self.bucket_of.get(parameter)
        return 0 if bucket is None else self.division.most_stepped(parameter, bucket)

    def owners(self, parameter: int) -> tuple[tuple[int, int], ...]:
        """Return the ranks that step a parameter, each with the number of elements that it steps."""
        return tuple((rank, numel) for rank, numel in enumerate(self.stepped_by_rank(parameter)) if numel)

    def parts(self, first_bucket: int = 0) -> list[Spec]:
        """Return the ranges that this rank steps, of the buckets from ``first_bucket`` on, under their keys and in the
        order of its tiles: buckets are filled from the last parameter on."""
        owned = [each for bucket in self.buckets[first_bucket:] for each in bucket.owned]
        return [self.specs[each.parameter].keyed(each.key, each.offset, each.numel) for each in reversed(owned)]

    def in_order_of_tiles(self) -> list[Spec]:
        """Return all parameters that have elements, in the order of :meth:`parts`."""
        return [self.specs[member.parameter] for bucket in self.buckets for member in bucket.members][::-1]
