"""Corpora as people write them, and passages found by number."""

from __future__ import annotations

import gzip
import json

import pytest

from trace_megatron.errors import UserError
from trace_megatron.retrieval.passages import Passage, PassageStore, read_corpus, write_passages


def test_both_forms_and_gzip_are_read_in_order(tmp_path):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(
        json.dumps({"id": 7, "title": "Zürich", "text": "A city.\nTwo lines \u2028 here."})
        + "\n\n"
        + json.dumps({"text": "no title"})
        + "\n",
        encoding="utf-8",
    )
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"id": "x", "contents": '"Ada Lovelace"\nShe wrote.'}) + "\n")
        file.write(json.dumps({"id": "y", "contents": "one line"}) + "\n")
    passages = [
        Passage("7", "Zürich", "A city.\nTwo lines \u2028 here."),
        Passage("1", "", "no title"),
        Passage("x", "Ada Lovelace", "She wrote."),
        Passage("y", "", "one line"),
    ]
    assert list(read_corpus([plain, packed])) == passages
    assert write_passages(passages, tmp_path) == 4
    store = PassageStore(tmp_path)
    assert [store[number] for number in (3, 0, 2, 1)] == [passages[number] for number in (3, 0, 2, 1)]
    assert len(store) == 4
    with pytest.raises(IndexError):
        store[4]
    assert [passage.indexed_text for passage in passages[1:3]] == ["no title", "Ada Lovelace\nShe wrote."]


@pytest.mark.parametrize("line", ["{", '{"id": 1}', "[]", '{"text": 5}'])
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "right"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2"):
        list(read_corpus([path]))


def test_missing_and_empty_corpora_are_refused(tmp_path):
    with pytest.raises(UserError, match="found nothing at"):
        list(read_corpus([tmp_path / "none.jsonl"]))
    with pytest.raises(UserError, match="expected passages in the corpus"):
        write_passages([], tmp_path)
