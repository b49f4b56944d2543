"""The paper's data sets: where they are, what their columns are called, how they are judged and how often sampled.

Columns are named as on the Hub, then as in other copies of the same data; the first that a row has counts. The
evaluation's k is that of arXiv 2606.11119.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from trace_megatron.errors import UserError

_ID = ("id", "_id", "unique_id", "question_id", "Record ID")
_QUESTION = ("question", "problem", "Question", "Problem")
_ANSWER = ("answer", "final_answer", "answers", "golden_answers", "Answer")


@dataclass(frozen=True, slots=True)
class Source:
    """One data set."""

    name: str
    kind: str
    """math, choice or qa."""
    hub: str
    """Repository on the Hub."""
    splits: Mapping[str, str]
    """Our split (train, eval) -> the Hub's. A train split is cut into train and validation."""
    config: str = "default"
    samples: int = 1
    """k: samples of each prompt in an evaluation."""
    id: tuple[str, ...] = _ID
    question: tuple[str, ...] = _QUESTION
    context: tuple[str, ...] = ()
    """Text that stands before the question."""
    answer: tuple[str, ...] = _ANSWER
    """A text, a number or a list; of a choice the letter, or the right choice's text where it is no letter."""
    more_answers: tuple[str, ...] = ("answer_variants", "answer_aliases")
    """A list of further accepted answers."""
    solution: tuple[str, ...] = ("solution",)
    """Where the answer is the last box, if no column holds it."""
    choices: tuple[str, ...] = ("choices", "options")
    """A list of texts, or a record of texts and labels (ARC)."""
    answer_index: tuple[str, ...] = ("answer_index",)
    """Position of the right choice, where the letter is not to be trusted."""
    wrong_choices: tuple[str, ...] = ()
    """Columns of one wrong choice each; the right one is put among them by a hash of the row."""
    images: tuple[str, ...] = ()
    """Columns that hold a picture where the problem needs one."""
    required: Mapping[str, object] = field(default_factory=dict)
    """Column -> the value that a usable row has, where it has the column."""


SOURCES = {
    source.name: source
    for source in (
        Source("deepscaler", "math", "agentica-org/DeepScaleR-Preview-Dataset", {"train": "train"}),
        Source("math500", "math", "HuggingFaceH4/MATH-500", {"eval": "test"}, samples=4),
        Source("aime24", "math", "HuggingFaceH4/aime_2024", {"eval": "train"}, samples=32),
        Source("amc23", "math", "math-ai/amc23", {"eval": "test"}, samples=16),
        Source("minerva", "math", "math-ai/minervamath", {"eval": "test"}, samples=4),
        Source(
            "olympiadbench",
            "math",
            "Hothan/OlympiadBench",
            {"eval": "train"},
            config="OE_TO_maths_en_COMP",
            samples=4,
            context=("context",),
            answer=("final_answer", "answer"),
            solution=(),
            images=("image_1", "image_2", "image_3", "image_4", "image_5", "image"),
            required={"question_type": "Open-ended", "modality": "Text-only", "language": "English"},
        ),
        Source("mmlu_pro", "choice", "TIGER-Lab/MMLU-Pro", {"eval": "test"}),
        Source(
            "arc_c",
            "choice",
            "allenai/ai2_arc",
            {"eval": "test"},
            config="ARC-Challenge",
            samples=4,
            answer=("answerKey", "answer"),
        ),
        Source(
            "gpqa",
            "choice",
            "Idavidrein/gpqa",
            {"eval": "train"},
            config="gpqa_diamond",
            samples=8,
            id=("Record ID", "id"),
            question=("Question", "question"),
            answer=("Correct Answer", "answer"),
            wrong_choices=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        ),
        Source("hotpotqa", "qa", "hotpotqa/hotpot_qa", {"train": "train", "eval": "validation"}, config="distractor"),
        Source(
            "2wiki",
            "qa",
            "RUC-NLPIR/FlashRAG_datasets",
            {"train": "train", "eval": "dev"},
            config="2wikimultihopqa",
            answer=("golden_answers", "answers", "answer"),
        ),
        Source(
            "musique",
            "qa",
            "dgslibisey/MuSiQue",
            {"train": "train", "eval": "validation"},
            required={"answerable": True},
        ),
        Source("bamboogle", "qa", "chiayewken/bamboogle", {"eval": "test"}),
    )
}


def find_source(name: str) -> Source:
    """The data set of that name. Raises UserError that names the nearest one."""
    if name in SOURCES:
        return SOURCES[name]
    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), SOURCES, n=1, cutoff=0.0)
    raise UserError(f"unknown data set '{name}': did you mean '{nearest[0]}'? Known: {', '.join(SOURCES)}")
