"""Open prompts, each another one: agents share little but what they are themselves."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.workloads.types import Ask, Conversation, Task, Workload, chat_messages, whole_tasks

_STREAM = 4

WRITERS: dict[str, str] = {
    "poet": (
        "You are a poet who distrusts big words. Your lines are short, your images come from kitchens, harbours and "
        "workshops, and you would rather leave a poem unfinished than decorate it. Nothing you write rhymes by force, "
        "and its title is the last thing that you look for."
    ),
    "novelist": (
        "You write prose fiction. Begin in the middle of a scene, let people speak in their own voices, and trust the "
        "reader to guess what nobody says aloud. A detail that could stand in any other story has no place in yours."
    ),
    "columnist": (
        "Once a week a newspaper prints what you think. You take one small observation, turn it around until it "
        "shows something larger, and stop before it becomes a lesson. Irony is welcome, contempt is not."
    ),
    "playwright": (
        "Everything that you invent happens on a stage, in dialogue, with as few stage directions as possible. Two "
        "people want different things and neither of them can leave the room; that is all a scene needs."
    ),
}
"""Agent -> system prompt."""

_FORMS = (
    "Write a short poem about", "Begin a story about", "Write a letter to a friend about", "Invent a legend about",
    "Write a monologue by somebody who lost", "Describe a morning that begins with", "Write a riddle whose solution is",
    "Tell a bedtime story about", "Write a weather report that turns into", "Write an obituary for",
    "Give a toast to", "Write the first page of a diary about",
)  # fmt: skip
_SUBJECTS = (
    "a lighthouse that moved inland", "the last typewriter in the ministry", "a bridge nobody remembers building",
    "two clocks that disagree", "an orchestra without a conductor", "a map of a town that was never built",
    "the inventor of the doorbell", "a cat that inherits a bakery", "snow in the wrong month",
    "a lost suitcase full of keys", "the oldest apple tree in the valley", "a radio that plays tomorrow's news",
    "a chess game by post", "the night shift in a museum", "a river that changed its mind", "an umbrella left on a train",
    "a school for retired pirates", "the silence after a concert", "a beekeeper on the tenth floor",
    "a recipe with one ingredient missing",
)  # fmt: skip
_LIMITS = (
    "Use no adjectives.", "Mention the sea once.", "End with a question.", "Somebody has to apologise.",
    "Keep it to a single paragraph.", "Nobody may be named.", "Let it rain at the end.", "Address the reader directly.",
    "Set it a hundred years ago.", "Include a number that matters.",
)  # fmt: skip


def creative(*, requests: int, seed: int) -> Workload:
    """`requests` prompts, all different, to four writers in turn. Nothing is scored.

    Raises UsageError for more prompts than there are (2,400).
    """
    count = whole_tasks(requests, 1)
    every = len(_FORMS) * len(_SUBJECTS) * len(_LIMITS)
    if count > every:
        raise UsageError(f"there are {every} creative prompts, not {count}: ask for fewer")
    chosen = np.random.default_rng([seed, _STREAM]).permutation(every)[:count]
    names = list(WRITERS)
    tasks = tuple(
        Task(f"prompt {number + 1}", 1, partial(_converse, names[number % len(names)], _prompt(int(index))))
        for number, index in enumerate(chosen)
    )
    return Workload("creative", WRITERS, tasks)


def _prompt(index: int) -> str:
    index, limit = divmod(index, len(_LIMITS))
    form, subject = divmod(index, len(_SUBJECTS))
    return f"{_FORMS[form]} {_SUBJECTS[subject]}. {_LIMITS[limit]}"


def _converse(agent: str, prompt: str) -> Conversation:
    yield Ask(agent, chat_messages(WRITERS[agent], prompt))
