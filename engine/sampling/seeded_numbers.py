"""The random numbers of a request that brings a seed."""

from hashlib import blake2b
from struct import pack


class SeededNumbers:
    """Uniform numbers in [0, 1) that depend on the seed, the token's place in the answer, and how many were drawn for that place.

    So what a seed gives does not depend on how many tokens a step tries, or on what is sampled and thrown away.
    """

    __slots__ = ("_num_drawn", "_place", "_seed")

    def __init__(self, seed: int, place: int = 0) -> None:
        self._seed = seed % 2**64
        self._place = place
        self._num_drawn = 0

    def random(self) -> float:
        digest = blake2b(pack("<QQQ", self._seed, self._place, self._num_drawn), digest_size=8).digest()
        self._num_drawn += 1
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def again(self) -> "SeededNumbers":
        """Those of the same place, from the first one on."""
        return SeededNumbers(self._seed, self._place)

    def at_next_place(self) -> "SeededNumbers":
        return SeededNumbers(self._seed, self._place + 1)
