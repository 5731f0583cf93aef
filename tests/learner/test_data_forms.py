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
from penstock.learner.data.templates import Template
from tests.learner.builders import make_settings
from tests.learner.test_dataset import ROW, CharTokenizer, load, write

OTHER = '{"question": "2+2=", "answer": "4"}'
USER = {"role": "user", "content": "q"}


def found(source: str, **changes):
    """Prompt and gold answer of each question."""
    questions, _ = load(source, **changes)
    return [(one.columns["prompt"], one.columns["solution"]) for one in questions]


def streamed(source: str, count: int = 2):
    """Prompt and gold answer of the first questions of a stream."""
    settings = make_settings(
        dataset=[source], dataset_streaming=True, max_steps=2, dataset_shuffle=False
    )
    questions, _ = load_questions(settings, Template(settings, CharTokenizer()))
    rows = [questions.at(position).columns for position in range(count)]
    return [(row["prompt"], row["solution"]) for row in rows]


READERS = pytest.mark.parametrize("read", [found, streamed], ids=["whole", "streamed"])
BOTH = [("1+1=", "2"), ("2+2=", "4")]


@READERS
@pytest.mark.parametrize(
    "ending", ["jsonl.gz", "json.gz", "JSONL", "ndjson", "csv.gz", "tsv", "arrow", "stream", "parquet"]
)
def test_files_of_each_ending_are_read(tmp_path, ending, read):
    path = tmp_path / f"q.{'arrow' if ending == 'stream' else ending}"
    lines = f"{json.dumps({'question': '1+1=', 'answer': '2'})}\n{OTHER}\n"
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
    if ending in BINARY:
        write_binary(path, ending, table)
    elif ending in ("csv.gz", "tsv"):
        text = "question,answer\n1+1=,2\n2+2=,4\n"
        text = text.replace(",", "\t") if ending == "tsv" else text
        path.write_bytes(gzip.compress(text.encode()) if ending == "csv.gz" else text.encode())
    else:
        path.write_bytes(gzip.compress(lines.encode()) if ending.endswith("gz") else lines.encode())
    assert read(str(path)) == BOTH


BINARY = ("arrow", "stream", "parquet")


def write_binary(path, form, table):
    """Write a table as an Arrow file, an Arrow stream or Parquet."""
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
        return
    make = pyarrow.ipc.new_file if form == "arrow" else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table)


@READERS
def test_a_pattern_names_several_files(tmp_path, read):
    (tmp_path / "a").mkdir()
    write(tmp_path / "b.jsonl", OTHER)
    (tmp_path / "a" / "a.csv").write_text("question,answer\n1+1=,2\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}))
    write(tmp_path / "c.txt", "no data")
    assert read(f"{tmp_path}/*.jsonl") == BOTH
    assert read(f"{tmp_path}/**/[ab].[cj]s*") == [BOTH[0], *BOTH][: 3 if read is found else 2]
    for name, words in (("x*", "no file matches"), ("x", "no such file")):
        with pytest.raises(DataError, match=words):
            read(f"{tmp_path}/{name}.jsonl")
    with pytest.raises(DataError, match=r"c\.txt: expected a file that ends in"):
        read(f"{tmp_path}/*.*")


@READERS
def test_files_of_several_forms_in_a_pattern_are_told(tmp_path, read):
    write(tmp_path / "a.jsonl", OTHER)
    write_binary(tmp_path / "a.parquet", "parquet", pyarrow.table({"question": ["1"], "answer": ["2"]}))
    with pytest.raises(DataError, match=r"a\.jsonl, .*a\.parquet: files of several forms"):
        read(f"{tmp_path}/a.*")


@READERS
def test_a_stream_reads_values_as_they_stand(tmp_path, read):
    """The library `datasets` would read 1, null, a date, 5.0, and the second of two columns."""
    rows = [["question", "answer", '"a\t,b"'], ["1+1=", "01", "1"], ["2", "NA", "x" * 200_000]]
    for separator in ",;\t":
        source = write(tmp_path / "q.csv", *map(separator.join, rows))
        assert read(source) == [("1+1=", "01"), ("2", "NA")]
    for golds in (["2020-01-02", "1e3"], ["five", 5], [5, 2.5]):
        rows = [{"question": "q", "answer": gold} for gold in golds]
        source = write(tmp_path / "q.jsonl", *map(json.dumps, rows))
        assert repr([gold for _, gold in read(source)]) == repr(golds)


MORE = {"question": "1", "answer": "2", "level": 3}


def test_columns_that_only_some_rows_have_are_null_elsewhere(tmp_path):
    questions, _ = load(write(tmp_path / "q.jsonl", ROW, json.dumps(MORE), ROW))
    assert [one.columns["level"] for one in questions] == [None, 3, None]
    write(tmp_path / "r.jsonl", ROW)
    assert [one.columns["level"] for one in load(f"{tmp_path}/[qr].jsonl")[0]] == [None, 3, None, None]


def test_a_streamed_row_has_the_columns_of_the_first_row(tmp_path):
    write(tmp_path / "a.jsonl", json.dumps(MORE), ROW)
    write(tmp_path / "b.jsonl", OTHER)
    settings = make_settings(
        dataset=[f"{tmp_path}/?.jsonl"], dataset_streaming=True, max_steps=2, dataset_shuffle=False
    )
    questions, _ = load_questions(settings, Template(settings, CharTokenizer()))
    assert [questions.at(position).columns["level"] for position in range(3)] == [3, None, None]


@READERS
def test_rows_that_each_bring_new_columns_are_told(tmp_path, read):
    rows = ({"question": "q", "answer": "a", **{f"{n}.{k}": 1 for k in range(100)}} for n in range(20))
    source = write(tmp_path / "q.jsonl", *map(json.dumps, rows))
    with pytest.raises(DataError, match=r"line 11: .*1102 columns together; expected at most 1024"):
        read(source, count=20) if read is streamed else read(source)


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
        ({"problem": "q", "solution": "By steps 5 and 6.", "Answer": "a"}, "q"),
        ({"Question": "q", "instruction": "Be brief.", "answer": "a"}, "q"),
        ({"conversation": SHARED, "answer": "a"}, [SYSTEM, USER]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "answer": "a"},
            [USER],
        ),
        ({"prompt": "q", "ground_truth": "a"}, "q"),
        ({"problem": "q", "solution": "a", "messages": [{"role": "user", "content": "no"}]}, "q"),
        ({"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "a"}}, [USER]),
        ({"messages": [USER, {"role": "assistant", "content": "no"}], "solution": "a"}, [USER]),
        ({"0": {"value": "q"}, "1": {"ground_truth": {"value": "a"}}}, "q"),
    ],
)
@READERS
def test_columns_and_conversations_of_others_are_recognised(tmp_path, read, row, prompt):
    source = write(tmp_path / "q.jsonl", json.dumps(row))
    assert read(source)[0] == (prompt, "a")


@READERS
@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_a_list_of_conversations_is_read(tmp_path, read, ending):
    text = json.dumps(ORZ, indent=1).encode()
    (tmp_path / f"orz.{ending}").write_bytes(text if ending == "json" else gzip.compress(text))
    second = {"role": "user", "content": "r"}
    assert read(str(tmp_path / f"orz.{ending}")) == [([USER], "a"), ([second], "b")]


def test_a_column_in_another_case_rides_along_where_no_reward_needs_it(tmp_path):
    source = write(tmp_path / "q.jsonl", json.dumps({"Question": "q", "Answer": "a"}))
    (question,), _ = load(source, rewards=["format"])
    assert question.columns["solution"] == "a"


def test_the_answer_of_a_conversation_is_one_setting_away(tmp_path):
    source = write(tmp_path / "q.jsonl", json.dumps({"conversations": SHARED}))
    with pytest.raises(DataError, match="LEARNER_SOLUTION_COLUMN"):
        load(source)
    assert found(source, solution_column="conversations.2.value") == [([SYSTEM, USER], "no")]


TEXT = {"type": "text", "text": "q"}


def asked(*parts):
    """A row with one message of these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}], "answer": "a"}


def shared(*turns):
    """A row of ShareGPT's turns, each a speaker and a value."""
    return {"conversations": [{"from": who, "value": value} for who, value in turns], "answer": "a"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"problem": "q", "Problem": "r", "answer": "a"},
            "LEARNER_PROMPT_COLUMN to one of problem, Prob",
        ),
        ({"question": "q", "Answer": "a", "ANSWER": "b"}, "SOLUTION_COLUMN to one of Answer, ANSWER"),
        (asked({"type": "image_url", "image_url": "x"}), "a part of type 'image_url'; expected text"),
        (asked(TEXT, {"type": "image", "text": "its caption"}), "a part of type 'image'; expected text"),
        (asked({"type": "text", "text": 7}), "a part whose text is 7; expected a text. Remove the row"),
        (asked(TEXT, {"type": "text"}), "a part whose text is missing; expected a text"),
        (asked({"type": "text", "text": " "}), "messages is .*; expected a text, or a list of messages"),
        (asked(), "messages is .*; expected a text"),
        (shared(("tool", "q")), "a turn is from 'tool'"),
        (shared((["human"], "q")), r"a turn is from \['human'\]"),
        (shared(("human", None), ("gpt", "no")), "a turn from human has no value"),
        (shared(("gpt", "no")), "conversations is .*; expected a text, or a list of messages"),
        (shared(("human", " "), ("gpt", "no")), "conversations is .*; expected a text"),
        ({"conversations": [{"from": "human", "content": "q"}], "answer": "a"}, "has no value"),
        ({"question": None, "answer": "2"}, "row 1: question is None"),
        ({"question": " ", "answer": "2"}, "row 1: question is ' '"),
        ({"prompt": [USER | {"content": None}], "answer": "2"}, "role and a text as content"),
        ({"question": "q", "answer": []}, r"row 1: answer is \[\]"),
        ({"question": "q", "answer": [math.nan]}, r"row 1: answer is \[nan\]"),
        ({"question": "q", "answer": math.inf}, "row 1: answer is inf"),
        ({"question": "q", "reward_model": {"ground_truth": {"value": ""}}}, "ground_truth is {'value"),
        ({"question": "q", "answer": " "}, "row 1: answer is ' '; expected the gold answer"),
        ({"question": "q", "answer": "NaN"}, "row 1: answer is 'NaN'"),
    ],
)
@READERS
def test_what_would_have_to_be_guessed_is_told(tmp_path, read, row, words):
    with pytest.raises(DataError, match=words):
        read(write(tmp_path / "q.jsonl", json.dumps(row)))


def test_a_number_after_a_pattern_takes_so_many_rows_of_all_files(tmp_path):
    write(tmp_path / "a.jsonl", OTHER, OTHER)
    write(tmp_path / "b.jsonl", OTHER)
    assert found(f"{tmp_path}/[ab].jsonl#2") == [BOTH[1]] * 2


def test_the_row_of_an_error_is_counted_in_the_file(tmp_path):
    """40 of 60 rows are drawn, with at least 30 of the last 50, which have no gold answer."""
    bad = json.dumps({"question": "q", "answer": None})
    source = write(tmp_path / "q.jsonl", *[ROW] * 10, *[bad] * 50)
    with pytest.raises(DataError, match=r"q\.jsonl, row 1[1-9]: answer is null"):
        load(f"{source}#40")


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
        ("q.jsonl", f"[{ROW}]".encode(), r"line 1: expected an object, found \[{"),
        ("q.json", f"[\n\n{ROW},\n7]".encode(), r"q\.json, item 2: expected an object"),
        ("q.json", f'[{ROW}, {{"a": 1}}]'.encode(), r"q\.json, item 2: has a, and none of"),
        ("q.json", b"[]", "q.json is empty"),
        ("q.csv", b"question,answer\n", "q.csv is empty"),
        ("q.json", b'[{"question": "1", "question": "2", "answer": "3"}]', "question is there twice"),
        ("q.jsonl.gz", gzip.compress(ROW.encode(), mtime=0)[:-6], "cannot be loaded"),
        ("q.jsonl.gz", ROW.encode(), "cannot be loaded"),
        ("q.arrow", b"no arrow", "cannot be loaded"),
        ("q.parquet", b"no parquet", "cannot be loaded"),
        ("q.jsonl", b"", "q.jsonl is empty"),
        ("q.jsonl", b'{"question": "\\ud800", "answer": "2"}', "half a character"),
        ("q.csv", b",question,answer\n0,1+1=,2\n", "line 1: a column has no name"),
        ("q.csv", b'question,answer\n1,2\n3,"4"5\n', "line 3: not readable as CSV"),
        ("q.csv", b'question,answer\n1,"2\n3,4\n', "line 3: not readable as CSV"),
    ],
)
@READERS
def test_damaged_files_are_told_with_the_place(tmp_path, read, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read(str(tmp_path / name))


@READERS
@pytest.mark.parametrize("form", BINARY)
def test_a_column_twice_in_a_binary_file_is_told(tmp_path, read, form):
    path = tmp_path / f"q.{'arrow' if form == 'stream' else form}"
    table = pyarrow.table([["1"], ["2"], ["3"]], names=["question", "answer", "answer"])
    write_binary(path, form, table)
    with pytest.raises(DataError, match="the column answer is there twice"):
        read(str(path))


@READERS
@pytest.mark.parametrize("form", BINARY)
@pytest.mark.parametrize("nested", [False, True])
def test_a_binary_file_that_is_not_utf_8_is_told(tmp_path, read, form, nested):
    letters = pyarrow.array([b"q\xe9"]).buffers()[1:]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, *letters])
    if nested:
        texts = pyarrow.ListArray.from_arrays([0, 1], texts)
    path = tmp_path / f"q.{'arrow' if form == 'stream' else form}"
    write_binary(path, form, pyarrow.table({"question": ["1"], "answer": texts}))
    words = "column answer has damaged values: .*UTF8" if read is found else "(?i)q.*utf-?8"
    with pytest.raises(DataError, match=words):
        read(str(path))


TOO_LATE = pyarrow.array([3_000_000], pyarrow.int32()).cast(pyarrow.date32())


@READERS
@pytest.mark.parametrize("form", BINARY)
@pytest.mark.parametrize(
    "values",
    [
        TOO_LATE,
        TOO_LATE.cast(pyarrow.timestamp("ms")),
        pyarrow.array([2**61], pyarrow.int64()).cast(pyarrow.duration("s")),
        pyarrow.ListArray.from_arrays([0, 1], TOO_LATE),
    ],
    ids=lambda values: str(values.type),
)
def test_a_date_that_python_has_no_value_for_is_told(tmp_path, read, form, values):
    path = tmp_path / f"q.{'arrow' if form == 'stream' else form}"
    write_binary(path, form, pyarrow.table({"question": ["1"], "answer": ["2"], "day": values}))
    words = "the column day has damaged values" if read is found else "cannot be loaded"
    with pytest.raises(DataError, match=rf"q\.{path.suffix[1:]}.*{words}"):
        read(str(path))


@READERS
@pytest.mark.parametrize("form", BINARY)
def test_a_file_with_the_letters_of_a_pattern_is_read_itself(tmp_path, read, form):
    ending = "arrow" if form == "stream" else form
    for name, answer in ((f"q[1].{ending}", "2"), (f"q1.{ending}", "3")):
        table = pyarrow.table({"question": ["1", "1"], "answer": [answer, answer]})
        write_binary(tmp_path / name, form, table)
    assert read(str(tmp_path / f"q[1].{ending}")) == [("1", "2")] * 2


@READERS
@pytest.mark.parametrize(
    "kind", [datasets.Image(), datasets.List(datasets.Image()), {"a": datasets.Audio()}]
)
def test_columns_of_images_are_told(tmp_path, read, kind):
    kinds = {"question": datasets.Value("string"), "answer": datasets.Value("string"), "seen": kind}
    rows = {"question": ["q"], "answer": ["a"], "seen": [None]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(
        tmp_path / "q.parquet"
    )
    with pytest.raises(DataError, match=r"the column seen holds values of type (Image|Audio)"):
        read(str(tmp_path / "q.parquet"))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("train.csv", "question,answer\n1+1=,007\n", "csv"),
        ("train.tsv", "question\tanswer\n1+1=\t007\n", "csv"),
        ("train.jsonl", '{"question": "1+1=", "answer": "2020-01-01"}\n', "json"),
    ],
)
def test_a_folder_whose_values_would_change_is_refused(tmp_path, name, text, told):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text(text)
    with pytest.raises(DataError, match=rf"d: {told}: .*files, such as .*d/\*\.{told}\*, which"):
        found(str(tmp_path / "d"))
    assert found(f"{tmp_path}/d/*.{name[6:]}") in ([("1+1=", "007")], [("1+1=", "2020-01-01")])


def test_a_folder_of_parquet_is_read(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "dataset_infos.json").write_text("{}")
    write_binary(
        tmp_path / "d" / "train.parquet",
        "parquet",
        pyarrow.table({"question": ["1+1="], "answer": ["2"]}),
    )
    assert found(str(tmp_path / "d")) == BOTH[:1]


def test_a_folder_cannot_be_streamed(tmp_path):
    with pytest.raises(DataError, match="a folder cannot be streamed"):
        streamed(str(tmp_path))


@READERS
def test_messages_that_an_export_made_a_text_are_read(tmp_path, read):
    texts = [json.dumps([USER]), "[1, 2] is a list"]
    rows = [{"messages": text, "answer": str(size)} for size, text in enumerate(texts, 4)]
    path = write(tmp_path / "q.jsonl", *map(json.dumps, rows))
    assert read(path) == [([USER], "4"), ("[1, 2] is a list", "5")]


def test_a_question_in_two_columns_is_told(tmp_path):
    row = {"instruction": "add", "input": "1,2", "output": "3", "answer": "3"}
    path = write(tmp_path / "q.jsonl", json.dumps(row))
    with pytest.raises(DataError, match="two columns, instruction and input: set"):
        found(path)
    assert found(path, prompt_column="instruction") == [("add", "3")]
    row["Input"] = row.pop("input")
    with pytest.raises(DataError, match="two columns, instruction and Input: set"):
        found(write(tmp_path / "q.jsonl", json.dumps(row)))
