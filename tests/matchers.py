"""Grammars by hand: matchers that spell one text, wander about, or misbehave."""

import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher
from tests.fakes import EOS, LETTERS, ids


class Grammar(CompiledGrammar):
    """A compiled grammar of whatever `make` makes."""

    num_bytes = 0

    def __init__(self, make: Callable[[], Any], *, has_quick_masks: bool = False) -> None:
        self._make = make
        self.has_quick_masks = has_quick_masks

    def matcher(self) -> Any:
        return self._make()


class Matcher(GrammarMatcher):
    """Allows, after the tokens `path`, those of `allowed(path)`; with `forces` it says where there is only one."""

    def __init__(self, *, forces: bool = True) -> None:
        self.path: list[int] = []
        self.forces = forces

    def allowed(self, path: list[int]) -> list[int]:
        raise NotImplementedError

    def fill_bitmask(self, row: Tensor) -> None:
        bits = torch.zeros(len(row) * 32, dtype=torch.int64)
        bits[self.allowed(self.path)] = 1
        row.copy_((bits.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32))

    def advance(self, token_id: int) -> bool:
        if token_id not in self.allowed(self.path):
            return False
        self.path.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.path)
        del self.path[-num_tokens:]

    def forced_tokens(self) -> list[int]:
        path = list(self.path)
        while self.forces and len(allowed := self.allowed(path)) == 1 and allowed != [EOS]:
            path += allowed
        return path[len(self.path) :]

    @property
    def finished(self) -> bool:
        return self.allowed(self.path) == [EOS]


class Spelling(Matcher):
    """One text, letter by letter, then, with `may_go_on`, any more of its last letter."""

    def __init__(self, text: str, *, may_go_on: bool = False, forces: bool = False) -> None:
        super().__init__(forces=forces)
        self.spelling = ids(text)
        self.may_go_on = may_go_on

    def allowed(self, path: list[int]) -> list[int]:
        if len(path) < len(self.spelling):
            return [self.spelling[len(path)]]
        return [EOS, self.spelling[-1]] if self.may_go_on else [EOS]


class Walk(Matcher):
    """A walk of at most `length` letters through a tree that `seed` plants: here one way goes on, there several, there it may end."""

    def __init__(self, seed: int, *, length: int = 30, forces: bool = True) -> None:
        super().__init__(forces=forces)
        self.seed = seed
        self.length = length

    def allowed(self, path: list[int]) -> list[int]:
        if len(path) >= self.length:
            return [EOS]
        number = zlib.crc32(repr((self.seed, path)).encode())
        ways = (1, 1, 1, 2, 5)[number % 5]
        letters = {LETTERS[(number // 7 + 3 * way) % len(LETTERS)] for way in range(ways)}
        return sorted(letters | ({EOS} if ways > 1 and number % 9 == 0 else set()))


class Blocked(Walk):
    """A walk whose masks come only once `release` is set. `asked` is set by the first that is asked for."""

    def __init__(self, seed: int, release: threading.Event, **options: Any) -> None:
        super().__init__(seed, **options)
        self.release = release
        self.asked = threading.Event()

    def forced_tokens(self) -> list[int]:
        self.asked.set()
        assert self.release.wait(timeout=60)
        return super().forced_tokens()
