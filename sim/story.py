"""What led to a broken invariant, in few lines: of the events that can have made a difference those that concern it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.messages import Buckets, Dense, Ping, Pong, Syn
from kvcomm_p2p.sim.broken import InvariantBroken
from kvcomm_p2p.sim.history import History, Moment
from kvcomm_p2p.sim.telling import Names, brief, mentions, told_effect
from kvcomm_p2p.sim.world import World

LINES_MAX = 40
NOTES_MAX = 12
"""Of them, faults: what was done to the machines concerned, or to all."""

_PLAIN = (ev.TimerExpired, ev.ChunkReceived, ev.BlockVerified, ev.AnchorsUsed)
"""Events that are only told of where something came of them."""

_ROUTINE = (Syn, Buckets, Dense, Ping, Pong)
"""Messages that are only told of where they mention somebody concerned; all others between machines concerned are told."""


@dataclass(frozen=True, slots=True)
class Story:
    """`lines`, oldest first; `concerned`: names of the machines from whose point of view it is told; `past`: how many events
    came before it in all, of which `left_out` concern it and found no room."""

    lines: tuple[str, ...]
    concerned: tuple[str, ...]
    past: int
    left_out: int


@dataclass(frozen=True, slots=True)
class _Line:
    at_s: float
    order: int
    text: str
    times: int = 1


def tell(world: World, history: History, broken: InvariantBroken, lines_max: int = LINES_MAX) -> Story:
    """From the point of view of the machine where it showed, and of those that it is about. Changes nothing."""
    names: dict[bytes, str] = {record_id: world.nodes[number].name for record_id, number in world.numbers.items()}
    concerned = {broken.number: None}
    concerned.update((number, None) for node_id, number in world.numbers.items() if node_id in broken.about)
    about = tuple(dict.fromkeys((*broken.about, *(world.nodes[number].node_id for number in concerned))))
    end = history.end(broken.number)
    past = history.past(end) if end is not None else []
    told = _once([line for moment in past for line in _lines(world, moment, concerned, about, broken.about, names)])
    notes = [
        _Line(at_s, -1, f"{world.nodes[number].name if number >= 0 else 'the network:'} {what}")
        for at_s, number, what in world.notes
        if number < 0 or number in concerned
    ][-NOTES_MAX:]
    kept = told[-max(1, lines_max - len(notes)) :]
    lines = sorted([*notes, *kept], key=lambda line: (line.at_s, line.order))
    return Story(
        tuple(f"{line.at_s:12.6f} s  {line.text}{f'  (× {line.times})' if line.times > 1 else ''}" for line in lines),
        tuple(world.nodes[number].name for number in sorted(concerned)),
        len(past),
        len(told) - len(kept),
    )


def _once(lines: Sequence[_Line]) -> list[_Line]:
    """What is said several times in a row, as by a network that doubles, is told once, with the first time."""
    told: list[_Line] = []
    for line in lines:
        if told and told[-1].text == line.text:
            told[-1] = replace(told[-1], times=told[-1].times + 1)
        else:
            told.append(line)
    return told


def _lines(
    world: World,
    moment: Moment,
    concerned: dict[int, None],
    about: Sequence[bytes],
    subject: Sequence[bytes],
    names: Names,
) -> Iterator[_Line]:
    """A moment at a machine concerned is told if it mentions anybody or anything concerned; one elsewhere, if what it brings is
    about the subject itself: it was passed on."""
    me, event = world.nodes[moment.machine].name, moment.event
    here = moment.machine in concerned
    words = about if here else subject
    if isinstance(event, ev.MessageReceived):
        between = here and event.sender in about and not isinstance(event.message, _ROUTINE)
        if between or mentions(event.message, words):
            text = f"{names.get(event.sender, '?')} → {me}  {brief(event.message, names, words)}"
            yield _Line(moment.at_s, moment.number, text)
    elif not isinstance(event, _PLAIN) and (here or mentions(event, words)):
        yield _Line(moment.at_s, moment.number, f"{me}  {brief(event, names, words)}")
    for effect in moment.effects if here else ():
        text = told_effect(effect, names, words)
        if text and (not isinstance(effect, ev.ReportPeer) or effect.peer in about):
            yield _Line(moment.at_s, moment.number, f"{me}  {text}")
