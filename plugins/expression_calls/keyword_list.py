"""Members in a fixed order, of which some may be left out, with commas between those that are there."""

from collections.abc import Sequence as Items

from penstock.engine.structure import Either, Literal, Repeat, Sequence, Structure


def keyword_list(members: Items[tuple[Structure, bool]], comma: str) -> Structure:
    """The members, each with whether it is required. A choice of which is the first one; those that follow it each bring their comma."""
    firsts: list[Structure] = []
    for place, (member, is_required) in enumerate(members):
        firsts.append(Sequence((member, *(_following(*rest, comma) for rest in members[place + 1 :]))))
        if is_required:
            return Either(tuple(firsts))
    return Either((*firsts, Literal("")))


def _following(member: Structure, is_required: bool, comma: str) -> Structure:
    following = Sequence((Literal(comma), member))
    return following if is_required else Repeat(following, 0, 1)
