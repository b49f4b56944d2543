"""A small corpus in which every passage can be found by what it says."""

from __future__ import annotations

import json
from pathlib import Path

from trace_megatron.retrieval.passages import Passage

_THINGS = ("river", "castle", "violin", "comet", "harbour", "emperor", "glacier", "printer", "orchard", "senator")
_PLACES = ("Lisbon", "Oslo", "Lima", "Kyoto")

PASSAGES = [
    Passage(
        f"p{number}",
        f"The {thing} of {place}",
        f"This {thing} stands near {place}. It was described {'twice' if number % 3 else 'once, in a letter,'} by a "
        f"visitor who counted {number} steps from the market of {place} to the old {thing}.",
    )
    for number, (thing, place) in enumerate((thing, place) for thing in _THINGS for place in _PLACES)
]


def write_corpus(path: Path) -> Path:
    path.write_text(
        "".join(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in PASSAGES), encoding="utf-8"
    )
    return path
