"""Data sets in the forms that people have: files, columns and conversations."""

from __future__ import annotations

import gzip
import json
import math

import datasets
import pyarrow
import pytest

from penstock.common.errors import DataError
from penstock.learner.data.questions import load_questions
from tests.learner.builders import make_settings
from tests.learner.test_dataset import ROW, CharTokenizer, load, write

OTHER = '{"question": "2+2=", "answer": "4"}'
USER = {"role": "user", "content": "q"}


def found(source: str, **changes):
    """Prompt and gold answer of each question."""
    questions, _ = load(source, **changes)
    return [(one.columns["prompt"], one.columns["solution"]) for one in questions]


def streamed(source: str):
    """Prompt and gold answer of the first two questions of a stream."""
    settings = make_settings(
        dataset=[source], dataset_streaming=True, max_steps=2, dataset_shuffle=False
    )
    questions, _ = load_questions(settings, CharTokenizer())
    rows = [questions.at(position).columns for position in (0, 1)]
    return [(str(row["prompt"]), str(row["solution"])) for row in rows]


BOTH = [("1+1=", "2"), ("2+2=", "4")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "ending", ["jsonl.gz", "json.gz", "JSONL", "ndjson", "csv.gz", "tsv", "arrow", "stream"]
)
def test_files_of_each_ending_are_read(tmp_path, ending, streaming):
    path = tmp_path / f"q.{'arrow' if ending == 'stream' else ending}"
    lines = f"{json.dumps({'question': '1+1=', 'answer': '2'})}\n{OTHER}\n"
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
    if ending in ("arrow", "stream"):
        make = pyarrow.ipc.new_file if ending == "arrow" else pyarrow.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table)
    elif ending in ("csv.gz", "tsv"):
        text = "question,answer\n1+1=,2\n2+2=,4\n"
        text = text.replace(",", "\t") if ending == "tsv" else text
        path.write_bytes(gzip.compress(text.encode()) if ending == "csv.gz" else text.encode())
    else:
        path.write_bytes(gzip.compress(lines.encode()) if ending.endswith("gz") else lines.encode())
    if not streaming:
        assert found(str(path)) == BOTH
        return
    assert streamed(str(path)) == BOTH


@pytest.mark.parametrize("streaming", [False, True])
def test_a_pattern_names_several_files(tmp_path, streaming):
    row = json.dumps({"question": "1+1=", "answer": "2"})
    write(tmp_path / "b.jsonl", OTHER)
    write(tmp_path / "a.jsonl", row)
    write(tmp_path / "c.txt", "no data")
    if not streaming:
        assert found(f"{tmp_path}/*.jsonl") == BOTH
        assert found(f"{tmp_path}/[ab].jsonl#1") in (BOTH[:1], BOTH[1:])
        with pytest.raises(DataError, match="no file matches"):
            load(f"{tmp_path}/x*.jsonl")
        return
    assert streamed(f"{tmp_path}/*.jsonl") == BOTH


def test_columns_that_only_some_rows_have_are_null_elsewhere(tmp_path):
    more = '{"question": "1", "answer": "2", "level": 3}'
    questions, _ = load(write(tmp_path / "q.jsonl", ROW, more, ROW))
    assert [one.columns["level"] for one in questions] == [None, 3, None]


ORZ = [
    [{"from": "human", "value": "q"}, {"from": "assistant", "ground_truth": {"value": "a"}}],
    [{"from": "human", "value": "r"}, {"from": "assistant", "ground_truth": {"value": "b"}}],
]
SHARED = [
    {"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "no"},
]  # fmt: skip
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (ORZ[0], [USER]),
        ({"conversations": SHARED, "answer": "a"}, [SYSTEM, USER]),
        ({"conversations": SHARED[:2], "final_answer": "a", "answer": "long"}, [SYSTEM, USER]),
        ({"conversations": SHARED[1:2], "label": "a"}, [USER]),
        ({"Problem": "q", "Answer": "a"}, "q"),
        ({"QUESTION": "q", "Final_Answer": "a"}, "q"),
        ({"query": "q", "response": "a"}, "q"),
        ({"question": "q", "final_answer": "a", "solution": "long"}, "q"),
        ({"question": "q", "answer": "a", "response": "of a model"}, "q"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "answer": "a"},
            [USER],
        ),
    ],
)
def test_columns_and_conversations_of_others_are_recognised(tmp_path, row, prompt):
    assert found(write(tmp_path / "q.jsonl", json.dumps(row))) == [(prompt, "a")]


def test_a_list_of_conversations_is_read(tmp_path):
    (tmp_path / "orz.json").write_text(json.dumps(ORZ, indent=1))
    second = {"role": "user", "content": "r"}
    assert found(str(tmp_path / "orz.json")) == [([USER], "a"), ([second], "b")]


def test_the_answer_of_a_conversation_is_one_setting_away(tmp_path):
    source = write(tmp_path / "q.jsonl", json.dumps({"conversations": SHARED}))
    with pytest.raises(DataError, match="LEARNER_SOLUTION_COLUMN"):
        load(source)
    assert found(source, solution_column="conversations.2.value") == [([SYSTEM, USER], "no")]


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"problem": "q", "Problem": "r", "answer": "a"},
            "LEARNER_PROMPT_COLUMN to one of problem, Prob",
        ),
        ({"question": "q", "Answer": "a", "ANSWER": "b"}, "SOLUTION_COLUMN to one of Answer, ANSWER"),
        ({"messages": IMAGE, "answer": "a"}, "a part of type 'image_url'; expected text"),
        ({"conversations": [{"from": "tool", "value": "q"}], "answer": "a"}, "a turn is from 'tool'"),
        ({"question": "q", "answer": " "}, "row 1: answer is ' '; expected the gold answer"),
        ({"question": "q", "answer": "NaN"}, "row 1: answer is 'NaN'"),
    ],
)
def test_what_would_have_to_be_guessed_is_told(tmp_path, row, words):
    with pytest.raises(DataError, match=words):
        load(write(tmp_path / "q.jsonl", json.dumps(row)))


@pytest.mark.parametrize("gold", [math.nan, math.inf, -math.inf])
def test_a_gold_that_is_no_number_is_told(tmp_path, gold):
    rows = [{"question": "q", "answer": 1.0}, {"question": "q", "answer": gold}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "q.parquet")
    with pytest.raises(DataError, match=r"row 2: answer is (nan|-?inf)"):
        load(str(tmp_path / "q.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "q.jsonl",
            ROW.encode() + b'\n{"question": "\xe9", "answer": "2"}',
            r"line 2: .*byte 15 .*0xe9",
        ),
        ("q.csv", b"question,answer\n\xff,2\n", r"line 2: not UTF-8: byte 1 of the line is 0xff"),
        ("q.jsonl", ROW.encode("utf-16"), "the file is UTF-16"),
        ("q.csv", "question,answer\n1,2\n".encode("utf-16"), "the file is UTF-16"),
        ("q.csv", b"question,answer,answer\n1,2,3\n", "line 1: the column answer is there twice"),
        (
            "q.jsonl",
            b'{"question": "1", "answer": "2", "answer": "3"}',
            "line 1: .*answer is there twice",
        ),
        ("q.json", b'[{"question": "1", "question": "2", "answer": "3"}]', "question is there twice"),
        ("q.jsonl.gz", gzip.compress(ROW.encode(), mtime=0)[:-6], "cannot be loaded"),
        ("q.jsonl.gz", ROW.encode(), "cannot be loaded"),
        ("q.arrow", b"no arrow", "cannot be loaded"),
    ],
)
def test_damaged_files_are_told_with_the_place(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load(str(tmp_path / name))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_twice_in_a_binary_file_is_told(tmp_path, kind):
    table = pyarrow.table([["1"], ["2"], ["3"]], names=["question", "answer", "answer"])
    path = tmp_path / f"q.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match="answer"):
        load(str(path))
