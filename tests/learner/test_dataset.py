"""Reading questions: what is wrong is named by line and column."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import structlog

from penstock.common.errors import ConfigError, DataError
from penstock.common.wire.codec import pack
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Version
from penstock.learner.data.columns import gold_columns, map_columns
from penstock.learner.data.order import Question, Shuffled, Streamed
from penstock.learner.data.plan import count_steps
from penstock.learner.data.questions import load_questions
from penstock.learner.data.sources import Source
from penstock.learner.data.templates import Template
from penstock.learner.data.tickets import TicketSource
from tests.common.builders import make_ticket
from tests.learner.builders import make_plan, make_settings
from tests.learner.test_templates import ChatTokenizer


class CharTokenizer:
    chat_template = None

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})()


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def load(*sources, **settings):
    """What is trained on, in the files' order, and what is held out."""
    settings = {"dataset": list(sources), "dataset_shuffle": False} | settings
    made = make_settings(**settings)
    questions, held_out = load_questions(made, Template(made, CharTokenizer()))
    return [questions.at(position) for position in range(len(questions))], held_out


ROW = json.dumps({"question": "1+1=", "answer": "2"})


def test_columns_are_recognised_and_the_rest_rides_along(tmp_path):
    row = json.dumps({"question": "1+1=", "answer": "2", "level": 3})
    questions, _ = load(write(tmp_path / "q.jsonl", row))
    assert questions[0].columns == json.loads(row) | {"prompt": "1+1=", "solution": "2"}
    assert questions[0].where.endswith("q.jsonl, row 1")
    assert questions[0].prompt_ids.tolist() == [ord(letter) for letter in "1+1="]


def test_the_first_five_rows_that_lack_the_gold_answer_are_named(tmp_path):
    bad = '{"question": "1+1="}'
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "q.jsonl", ROW, bad, bad, ROW, *[bad] * 9))
    assert re.findall(r"row (\d+): answer is null", str(caught.value)) == ["2", "3", "5", "6", "7"]


def test_a_missing_column_is_told_with_those_that_are_there(tmp_path):
    source = write(tmp_path / "q.jsonl", ROW)
    with pytest.raises(DataError, match=r"column 'task' is missing; it has question, answer"):
        load(source, prompt_column="task")
    with pytest.raises(DataError, match="none of the columns prompt, question"):
        map_columns(["text", "answer"], source, make_settings(), {})


@pytest.mark.parametrize(
    ("chosen", "inside", "outside"),
    [
        (
            "",
            ["answer", "solution", "reward_model", "1", "conversations", "messages", "label"],
            ["prompt"],
        ),
        ("extra.Gold", ["extra", "extra.gold", "solution", "messages"], ["answer", "label", "gold"]),
    ],
)
def test_the_columns_of_the_gold_answer_are_the_chosen_one_or_the_usual_ones(chosen, inside, outside):
    found = gold_columns(chosen)
    assert set(inside) <= set(found)
    assert not set(outside) & set(found)


def test_prompts_over_the_limit_are_left_out(tmp_path):
    long = json.dumps({"question": "1" * 30, "answer": "2"})
    with structlog.testing.capture_logs() as logs:
        questions, _ = load(write(tmp_path / "q.jsonl", ROW, long), max_prompt_length=10)
    assert re.search(r"and were left out: the longest has \d\d+\.", logs[-1]["event"])
    assert len(questions) == 1


def test_prompts_with_letters_that_the_tokenizer_does_not_know_are_counted(tmp_path, monkeypatch):
    odd = json.dumps({"question": "1?1=", "answer": "2"})
    path = write(tmp_path / "q.jsonl", ROW, odd, odd)
    monkeypatch.setattr(CharTokenizer, "unk_token_id", ord("?"), raising=False)
    with structlog.testing.capture_logs() as logs:
        load(path)
    assert "2 prompts have letters that the model's tokenizer does not know" in logs[-1]["event"]
    monkeypatch.setattr(CharTokenizer, "eos_token_id", ord("?"), raising=False)
    with structlog.testing.capture_logs() as logs:
        load(path)
    assert "tokenizer" not in logs[-1]["event"]


def test_a_ticket_made_again_is_the_same_ticket():
    source = make_plan(make_settings()).source
    first, again = (source.train(TicketId("train:17"), Version(1, 0)) for _ in range(2))
    assert first.columns == again.columns
    assert first.sampling == again.sampling
    assert np.array_equal(first.prompt_ids, again.prompt_ids)


def test_an_epoch_asks_every_question_once_and_the_next_in_another_order():
    plan = make_plan(make_settings())
    source: TicketSource = plan.source
    size = len(source.questions)
    epochs = [
        [
            source.train(TicketId.train(e * size + i), Version(1, 0)).columns["answer"]
            for i in range(size)
        ]
        for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(str(n) for n in range(size))
    assert epochs[0] != epochs[1]


def test_a_ticket_is_not_sampled_by_a_version_older_than_itself():
    assert make_plan(make_settings()).source.train(TicketId("train:0"), Version(1, 4)).min_step == 4


def test_steps_are_counted_by_epochs_unless_given():
    assert count_steps(make_settings(groups_per_step=4, num_train_epochs=2), 10) == 5
    assert count_steps(make_settings(max_steps=7), 10) == 7
    assert count_steps(make_settings(groups_per_step=10, num_train_epochs=1.1), 100) == 11


def rows_of(*pairs):
    return [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]


def prompts(questions):
    return [question.columns["prompt"] for question in questions]


def test_own_columns_may_be_nested(tmp_path):
    row = {"task": {"text": "q"}, "gold": ["x", "a"]}
    source = write(tmp_path / "q.jsonl", json.dumps(row))
    (question,), _ = load(source, prompt_column="task.text", solution_column="gold.1")
    assert (question.columns["prompt"], question.columns["solution"]) == ("q", "a")


def test_a_gold_is_needed_only_if_a_reward_needs_it(tmp_path):
    source = write(tmp_path / "q.jsonl", json.dumps({"question": "q"}))
    with pytest.raises(DataError, match="Set LEARNER_SOLUTION_COLUMN to one of these"):
        load(source)
    (question,), _ = load(source, rewards=["format"])
    assert question.columns == {"prompt": "q", "question": "q"}
    source = write(
        tmp_path / "some.jsonl", '{"question": "q", "answer": null}\n{"question": "r", "answer": 1}'
    )
    with pytest.raises(DataError, match="answer is null"):
        load(source)
    questions, _ = load(source, rewards=["format"])
    assert [one.columns["solution"] for one in questions] == [None, 1]


def test_dates_and_decimals_ride_along_as_text(tmp_path):
    rows = {"question": ["q"], "answer": [Decimal("1.50")], "at": [datetime.date(2026, 1, 2)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "q.parquet")
    (question,), _ = load(str(tmp_path / "q.parquet"))
    assert question.columns["at"] == "2026-01-02"
    assert question.columns["solution"] == "1.50"
    assert pack(question.columns)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("q.jsonl", "\n" + ROW + "\n\n" + ROW + "\n \n"),
        ("q.jsonl", "\ufeff" + ROW),
        ("q.csv", "\ufeffquestion,answer\n1+1=,2\n"),
        ("q.json", "\n  [" + ROW + "]"),
    ],
    ids=["empty lines", "byte-order mark", "byte-order mark in CSV", "space before a list"],
)
def test_untidy_files_are_read(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    questions, _ = load(str(tmp_path / name))
    assert questions[0].columns["prompt"] == json.loads(ROW)["question"]


def test_a_data_set_of_long_prompts_alone_is_told(tmp_path):
    with pytest.raises(DataError, match="LEARNER_MAX_PROMPT_LENGTH=512"):
        load(write(tmp_path / "q.jsonl", *rows_of(("1" * 5000, "2"))))


def nested(levels):
    return "[" * levels + "1" + "]" * levels


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("q.jsonl", f'{ROW[:-1]}, "a": 1}}\n{ROW[:-1]}, "a": {nested(50_000)}}}', "line 2: .*too deep"),
        ("q.jsonl", f'{ROW[:-1]}, "a": {nested(60)}}}', r"line 1: .*a\.0.*nested deeper than"),
        ("q.json", f'[{ROW[:-1]}, "a": {nested(50_000)}}}]', r"q\.json: .*nested too deep"),
        ("q.jsonl", f'{ROW[:-1]}, "a": {nested(33)}}}', "row 1: column a: .*nested deeper than 32"),
        ("q.jsonl", f'{ROW[:-1]}, "a": {2**70}}}', "line 1: .*a: an integer of 71 bits"),
        ("q.jsonl", f'{ROW[:-1]}, "a": {"9" * 5000}}}', "line 1: not readable as JSON"),
        ("q.jsonl", f'{ROW[:-1]}, "{"a" * 201}": 1}}', "row 1: column 'aaa.* has 201 characters"),
        ("q.jsonl", f'"{"a" * 100_000}"', "line 1: expected an object"),
        ("q.jsonl", f"{ROW}\n{'a' * 100_000}", "line 2: not readable"),
        ("q.jsonl", f'{ROW}\n{{"{"a" * 100_000}": 1}}', "line 2: has aaa.*none of the columns before"),
        (
            "q.csv",
            ",".join(["question", "answer", *map(str, range(1024))]) + "\n" + ",".join("1" * 1026),
            "row 1: 1028 names",  # with prompt and solution
        ),
        (
            "q.csv",
            ",".join(["question", "answer", *map(str, range(1021))]) + "\n" + ",".join("1" * 1023),
            "row 1: 1025 names",
        ),
        (
            "q.jsonl",
            json.dumps({"prompt": '[{"role": "user", "content": "1", "more": ' + nested(32) + "}]"})[:-1]
            + ', "answer": "2"}',
            "row 1: column prompt: .*nested deeper",
        ),
        (
            "q.jsonl",
            '{"prompt": [{"role": "user", "content": "1", "more": ' + nested(35) + '}], "answer": "2"}',
            "row 1: column prompt: .*nested deeper",
        ),
    ],
    ids=lambda value: value[:20] if value[:1] in ("l", "r") else "",
)
def test_what_no_ticket_can_hold_is_named_by_file_and_row(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        load(str(tmp_path / name))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("streaming", [False, True])
def test_a_value_nested_too_deep_in_parquet_is_named(tmp_path, streaming):
    value = json.loads(nested(40))
    table = pyarrow.Table.from_pylist([{"question": "1+1=", "answer": "2", "a": value}])
    pyarrow.parquet.write_table(table, tmp_path / "q.parquet")
    with pytest.raises(DataError, match=r"row 1: column a: .*nested deeper than 32"):
        load(str(tmp_path / "q.parquet"), dataset_streaming=streaming, max_steps=2)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_without_tokens_is_named(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr(Template, "render", lambda *_: [])
    source = write(tmp_path / "q.jsonl", ROW)
    with pytest.raises(DataError, match=r"q\.jsonl, row 1.*: the prompt has no token, expected at"):
        load(source, dataset_streaming=streaming, max_steps=2)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_the_chat_template_rejects_is_named(tmp_path, streaming):
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('no') }}")
    made = make_settings(
        dataset=[write(tmp_path / "q.jsonl", ROW)], dataset_streaming=streaming, max_steps=2,
        prompt_template=str(template),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"q\.jsonl, row 1.*: LEARNER_PROMPT_TEMPLATE: the chat"):
        load_questions(made, Template(made, ChatTokenizer()))


def test_the_deepest_row_makes_a_ticket(tmp_path):
    questions, _ = load(write(tmp_path / "q.jsonl", f'{ROW[:-1]}, "a": {nested(32)}}}'))
    replace(make_ticket(), columns=questions[0].columns)


@pytest.mark.parametrize("splits", [False, True])
def test_saved_folders_are_read(tmp_path, splits):
    rows = datasets.Dataset.from_list(
        [{"question": "01+1=", "answer": "02"}, {"question": "2+2=", "answer": "4"}]
    )
    (datasets.DatasetDict({"train": rows}) if splits else rows).save_to_disk(tmp_path / "saved")
    questions, _ = load(str(tmp_path / "saved"))
    assert [(q.columns["prompt"], q.columns["solution"]) for q in questions] == [
        ("01+1=", "02"), ("2+2=", "4"),
    ]  # fmt: skip


def test_a_split_that_is_not_there_is_told_with_those_that_are(tmp_path):
    rows = datasets.Dataset.from_list([{"question": "1+1=", "answer": "2"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="no split validation is there, expected one of train"):
        load(str(tmp_path / "saved"), dataset_split="validation")


def test_a_number_takes_so_many_rows_by_the_seed(tmp_path):
    source = write(tmp_path / "q.jsonl", *rows_of(*((str(n), str(n)) for n in range(20))))
    first, again, other = (
        prompts(load(f"{source}#5", seed=seed)[0]) for seed in (1, 1, 2)
    )  # fmt: skip
    assert len(first) == 5
    assert first == again != other
    assert len(load(f"{source}#50")[0]) == 20
    with pytest.raises(DataError, match="a number of rows after #, found 'many'"):
        load(f"{source}#many")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("AI-MO/NuminaMath-TIR#5000", Source("AI-MO/NuminaMath-TIR", count=5000)),
        ("openai/gsm8k:main", Source("openai/gsm8k", "main")),
        ("openai/gsm8k:main@v1#7", Source("openai/gsm8k", "main", "v1", 7)),
        ("openai/gsm8k@v1", Source("openai/gsm8k", revision="v1")),
    ],
)
def test_hub_ids_name_configuration_revision_and_rows(text, parsed):
    assert Source.parse(text) == parsed


def test_several_data_sets_are_mixed_by_their_weights(tmp_path):
    many = write(tmp_path / "many.jsonl", *rows_of(*((f"m{n}", "1") for n in range(30))))
    few = write(tmp_path / "few.jsonl", *rows_of(*((f"f{n}", "1") for n in range(10))))
    asked = prompts(load(many, few, dataset_shuffle=True)[0])
    assert sorted(asked) == sorted([f"m{n}" for n in range(30)] + [f"f{n}" for n in range(10)])
    asked = prompts(load(many, few, dataset_shuffle=True, dataset_weights=[1, 3])[0])
    assert len(asked) == 40
    counts = Counter(asked)
    assert [counts[f"f{n}"] for n in range(10)] == [3] * 10
    assert len([name for name in counts if name.startswith("m")]) == 10


def test_with_weights_every_question_comes_round_over_the_epochs(tmp_path):
    sets = [[Question(np.array([n], "<i4"), {"n": n}) for n in range(10)],
            [Question(np.array([n], "<i4"), {"n": n}) for n in range(10, 20)]]  # fmt: skip
    order = Shuffled(sets, [4, 1], seed=3, shuffle=True)
    counts = Counter(order.at(position).columns["n"] for position in range(5 * len(order)))
    assert [counts[n] for n in range(10)] == [8] * 10
    assert [counts[n] for n in range(10, 20)] == [2] * 10


def test_questions_are_held_out_by_the_seed_and_never_trained(tmp_path):
    source = write(tmp_path / "q.jsonl", *rows_of(*((f"q{n}", "1") for n in range(20))))
    trained, held_out = load(source, eval_holdout=0.25)
    assert len(held_out) == 5
    assert not set(prompts(trained)) & set(prompts(held_out))
    assert prompts(load(source, eval_holdout=5)[1]) == prompts(held_out)
    more = write(tmp_path / "more.jsonl", *rows_of(*((f"q{n}", "1") for n in (0, *range(25)))))
    added = {prompt for prompt in prompts(load(more)[0]) if prompt not in prompts(load(source)[0])}
    trained, held_more = load(more, eval_holdout=5)
    assert set(prompts(held_more)) <= {*prompts(held_out), *added}
    for seed in range(20):  # of the two equal rows none is on the other side
        trained, held_out = load(more, eval_holdout=5, seed=seed)
        assert not set(prompts(trained)) & set(prompts(held_out))
        assert len(held_out) in (4, 5)
    assert prompts(load(source, eval_holdout=5, seed=1)[1]) != prompts(held_out)
    with pytest.raises(ConfigError, match="expected at least one to train on"):
        load(source, eval_holdout=20)


def test_held_out_questions_that_are_trained_too_are_named(tmp_path):
    train = write(tmp_path / "t.jsonl", *rows_of(("a", "1"), ("b", "2"), ("c", "3")))
    held = write(tmp_path / "h.jsonl", *rows_of(("x", "1"), ("b", "9"), ("c", "3")))
    with structlog.testing.capture_logs() as logs:
        load(train, eval_dataset=[held], eval_samples=1)
        load(train, eval_dataset=[held])
    (said,) = (one["event"] for one in logs if one["log_level"] == "warning")
    assert re.match(r"2 of 3 held-out questions .*/h.jsonl, row 2 \(.*/t.jsonl, row 2\), ", said)


def test_long_prompts_may_be_cut_at_their_beginning(tmp_path):
    source = write(tmp_path / "q.jsonl", *rows_of(("x" * 30 + "1+1=", "2")))
    (question,), _ = load(source, max_prompt_length=6, overlong_prompts="truncate")
    assert question.prompt_ids.tolist() == [ord(letter) for letter in "xx1+1="]


def stream(source, **settings):
    base = {"dataset": [source], "dataset_streaming": True, "max_steps": 5}
    made = make_settings(**(base | settings))
    return load_questions(made, Template(made, CharTokenizer()))[0]


def test_a_stream_gives_the_same_question_at_a_position_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Streamed, "KEPT", 4)
    source = write(tmp_path / "q.jsonl", *rows_of(*((f"q{n}", "1") for n in range(10))))
    questions = stream(source)
    first = [questions.at(position).columns["prompt"] for position in range(25)]
    assert sorted(first[:10]) == sorted(first[10:20]) == sorted(f"q{n}" for n in range(10))
    assert first[:10] != first[10:20]
    again = stream(source)
    assert [again.at(position).columns["prompt"] for position in (24, 3, 0, 13)] == [
        first[position] for position in (24, 3, 0, 13)
    ]


def test_a_bad_row_of_a_stream_is_told_each_time_and_read_again(tmp_path):
    source = write(tmp_path / "q.jsonl", *rows_of(("a", "1"), ("b", "1")), "no JSON")
    questions = stream(source, dataset_shuffle=False)
    for _ in range(2):
        with pytest.raises(DataError, match="line 3: not readable as JSON"):
            questions.at(2)
    write(tmp_path / "q.jsonl", *rows_of(("a", "1"), ("b", "1"), ("c", "1")))
    assert [questions.at(position).columns["prompt"] for position in (2, 0)] == ["c", "a"]


def test_a_stream_in_the_files_order_leaves_long_prompts_out(tmp_path):
    source = write(tmp_path / "q.jsonl", *rows_of(("a", "1"), ("b" * 30, "1"), ("c", "1")))
    questions = stream(source, dataset_shuffle=False, max_prompt_length=10)
    assert [questions.at(position).columns["prompt"] for position in range(3)] == ["a", "c", "a"]


def test_a_stream_has_the_columns_of_its_first_row_in_every_epoch(tmp_path):
    rows = [{"question": f"q{n}", "answer": "1", "prompt": "p"} for n in range(9)]
    source = write(tmp_path / "q.jsonl", ROW, *map(json.dumps, rows))
    questions = stream(source)
    asked = [questions.at(position).columns["prompt"] for position in range(50)]
    assert Counter(asked) == dict.fromkeys(("1+1=", *(f"q{n}" for n in range(9))), 5)


def test_a_stream_needs_a_number_of_steps(tmp_path):
    source = write(tmp_path / "q.jsonl", ROW)
    with pytest.raises(ConfigError, match="found 1 data sets, LEARNER_MAX_STEPS=0 and"):
        stream(source, max_steps=0)
