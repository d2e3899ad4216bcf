from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
from torch import Tensor

from penstock.engine.constraints.compiler import MAX_REFUSAL, Compiled, GrammarChoice, Refusal, exact, is_lenient
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.contracts.structure import Either, Literal, Repeat, Sequence, Structure, Value
from penstock.engine.errors import ConfigurationError, ConstraintTooLarge, UnsupportedGrammar, UnsupportedKind

SCHEMA = GrammarSpec(GrammarKind.JSON_SCHEMA, "{}", "guided_json")
REGEX = GrammarSpec(GrammarKind.REGEX, "a", "guided_regex")


class Tokens:
    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary:
        return Vocabulary((b"a", None), logits_width, frozenset(stop_token_ids), "a and an end")


@dataclass
class Grammar(CompiledGrammar):
    made_by: "Backend"
    num_bytes: int = 1
    warnings: tuple[str, ...] = ()

    def matcher(self) -> GrammarMatcher:
        raise AssertionError("nothing here runs a grammar")


@dataclass
class Backend(GrammarBackend):
    """Registered as its own factory. Raises `error` where it has one, and is asked for `specs`."""

    error: Exception | None = None
    preferred_kinds: frozenset[GrammarKind] = frozenset()
    specs: list[GrammarSpec] = field(default_factory=list)

    def __call__(self, vocabulary: Vocabulary) -> "Backend":
        return self

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.specs.append(spec)
        if self.error is not None:
            raise self.error
        return Grammar(self)


def choice(**backends: Callable[[Vocabulary], Backend]) -> GrammarChoice:
    return GrammarChoice(backends, Tokens(), 2, [1])


def refusal(message: str, param: str) -> Backend:
    return Backend(UnsupportedGrammar(message, param))


def test_those_that_prefer_a_kind_come_first_and_otherwise_the_order_is_that_of_registration() -> None:
    first, second, third = Backend(), Backend(preferred_kinds=frozenset({GrammarKind.REGEX})), Backend()
    backends = choice(first=first, second=second, third=third)
    assert backends.order(GrammarKind.JSON_SCHEMA) == ["first", "second", "third"]
    assert backends.order(GrammarKind.REGEX) == ["second", "first", "third"]
    assert backends.compile(SCHEMA, None) == Compiled(Grammar(first), "first")
    assert backends.compile(REGEX, None) == Compiled(Grammar(second), "second")
    assert backends.compile(REGEX, "third") == Compiled(Grammar(third), "third")


def test_a_function_may_be_registered_as_a_backend() -> None:
    backend = Backend()
    assert choice(function=lambda vocabulary: backend).compile(SCHEMA, None) == Compiled(Grammar(backend), "function")


def test_the_preferred_backends_refusal_is_reported_unless_it_is_about_the_kind_alone() -> None:
    kind = Backend(UnsupportedKind("no schemas here", "guided_json"), frozenset({GrammarKind.JSON_SCHEMA}))
    backends = choice(one=refusal("`not` is not supported", "guided_json.not"), two=kind, three=refusal("`if`", "guided_json.if"))
    assert backends.order(SCHEMA.kind)[0] == "two"
    assert backends.compile(SCHEMA, None) == Refusal("`not` is not supported", ".not")
    assert backends.compile(SCHEMA, "two") == Refusal("no schemas here", "")
    assert choice().compile(SCHEMA, None) == Refusal("no grammar backend is loaded", "")


def test_no_backend_is_asked_after_one_that_says_that_the_constraint_is_too_large_for_any() -> None:
    first, last = refusal("an index too large for me", "guided_json"), Backend()
    backends = choice(first=first, second=Backend(ConstraintTooLarge("too large", "guided_json.a")), last=last)
    assert backends.compile(SCHEMA, None) == Refusal("too large", ".a")
    assert (len(first.specs), last.specs) == (1, [])
    assert backends.compile(SCHEMA, "last") == Compiled(Grammar(last), "last")


def test_what_nests_too_deeply_for_a_backend_is_refused_without_asking_others() -> None:
    next_one = Backend()
    assert choice(one=Backend(RecursionError()), two=next_one).compile(SCHEMA, None) == Refusal("nested too deeply", "")
    assert not next_one.specs


def test_a_refusal_keeps_its_place_for_a_request_with_another_field() -> None:
    inside = Refusal.of(UnsupportedGrammar("no", "guided_json.a"), "guided_json")
    assert inside.error("structured_outputs.json").param == "structured_outputs.json.a"
    elsewhere = Refusal.of(UnsupportedGrammar("no", "tools[0].function"), "tool_choice")
    assert elsewhere.error("another").param == "tools[0].function"
    assert Refusal.of(UnsupportedGrammar("no", None), "guided_json").error("b").param == "b"


def test_a_refusal_keeps_little_of_a_long_name() -> None:
    refusal = Refusal.of(UnsupportedGrammar("no " + "a" * 10**6, "guided_json." + "a" * 10**6), "guided_json")
    assert len(refusal.message) == len(refusal.path) == MAX_REFUSAL


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: Sequence((Literal("a"), p)), lambda p: Either((p,)), lambda p: Repeat(p, 1, 2)])
def test_an_exact_constraint_differs_in_leniency_only(wrap: Callable[[Structure], Structure]) -> None:
    strict = GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=wrap(Value(SCHEMA)))
    lenient = replace(strict, structure=wrap(Value(replace(SCHEMA, is_lenient=True))))
    assert is_lenient(lenient)
    assert not is_lenient(strict)
    assert exact(lenient) == strict
    assert exact(strict) is strict
    assert exact(replace(SCHEMA, is_lenient=True)) == SCHEMA


def test_a_warm_up_makes_the_backends_of_usual_constraints_and_survives_refusals() -> None:
    schemas, texts, last = Backend(preferred_kinds=frozenset({GrammarKind.JSON_SCHEMA})), refusal("not that", ""), Backend()
    backends = choice(texts=texts, schemas=schemas, last=last)
    backends.warm_up()
    assert [spec.kind for spec in schemas.specs] == [GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE]
    assert [spec.kind for spec in texts.specs] == [GrammarKind.CHOICE]
    assert last.specs == []


def test_a_warm_up_makes_backends_that_no_usual_constraint_gets() -> None:
    made: list[Vocabulary] = []

    def factory(vocabulary: Vocabulary) -> Backend:
        made.append(vocabulary)
        return Backend()

    choice(first=Backend(), second=factory).warm_up()
    assert len(made) == 1


def test_each_backends_attempts_are_counted_by_how_they_ended() -> None:
    backends = choice(one=refusal("no", "guided_json"), two=Backend(ZeroDivisionError()), three=Backend())
    backends.compile(SCHEMA, "one")
    backends.compile(SCHEMA, "three")
    with pytest.raises(ZeroDivisionError):
        backends.compile(SCHEMA, None)
    attempts, seconds = backends.counts.read()
    assert attempts == {("one", "refused"): 2, ("three", "compiled"): 1, ("two", "failed"): 1}
    assert [sum(seconds[name].counts) for name in ("one", "two", "three")] == [2, 1, 1]
    backends = choice(only=Backend())
    backends.warm_up()
    assert backends.counts.read() == ({}, {})


def test_what_derives_from_no_contract_is_refused_by_name() -> None:
    class Lonely:
        def compile(self, spec: GrammarSpec) -> None: ...

    class Careless(Backend):
        def compile(self, spec: GrammarSpec) -> CompiledGrammar:
            return "a*"  # type: ignore[return-value]

    with pytest.raises(ConfigurationError, match=r"'mine' makes a Lonely, which does not derive from `penstock.GrammarBackend`"):
        choice(mine=lambda vocabulary: Lonely()).warm_up()  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match=r"'mine' makes a str, which does not derive from `penstock.CompiledGrammar`"):
        choice(mine=Careless()).compile(SCHEMA, None)


def test_what_has_a_default_may_be_left_out() -> None:
    class Least(GrammarMatcher):
        finished = False

        def fill_bitmask(self, row: Tensor) -> None: ...

        def advance(self, token_id: int) -> bool:
            return True

        def rollback(self, num_tokens: int) -> None: ...

    matcher = Least()
    assert (matcher.is_quick, matcher.fork(), matcher.forced_tokens()) == (True, None, [])
