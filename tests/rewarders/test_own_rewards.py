"""Rewards of users: the ones docs/rewards.md shows, and the ways in which they can be wrong."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ConfigError
from penstock.common.wire.reward_spec import BUILT_IN, RewardSpec
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.rewarders.test_pool import arguments

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=2, user="")) as pool:
        yield pool


def documented(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Write the page's files; by their names, what the page sets LEARNER_REWARDS to."""
    monkeypatch.chdir(folder)
    blocks = re.findall(
        r"```python\n# (\w+\.py)(.*?)```\n\n?(?:    LEARNER_REWARDS=(\S+))?", PAGE, re.DOTALL
    )
    for name, code, _ in blocks:
        (folder / name).write_text(f"#{code}")
    return {name: variable for name, _, variable in blocks}


def specs(variable: str) -> tuple[RewardSpec, ...]:
    """What the learner makes of LEARNER_REWARDS."""
    return resolve_rewards(LearnerSettings(rewards=variable))


def write(folder: Path, code: str) -> Path:
    path = folder / "own.py"
    path.write_text(code)
    return path


def score(pool: ScoringPool, spec: RewardSpec, *completions: str, **columns: Any) -> tuple[Any, ...]:
    assert pool.check(spec) == ""
    return pool.score(spec, arguments(*completions, **columns)).values


@pytest.mark.parametrize(
    ("file", "completions", "values"),
    [
        ("short.py", ("it is 72", "72" + "!" * 40, "71"), (1.0, 0.0, 0.0)),
        ("plugin.py", ("short", "x" * 2000), (1.0, 0.0)),
        ("gsm8k_score.py", ("it is 72", "71"), (1.0, 0.0)),
        ("same.py", (" 72", "it is 72"), (1.0, 0.0)),
    ],
)
def test_what_the_page_shows_works_by_one_variable(
    pool: ScoringPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, completions, values
) -> None:
    variables = documented(tmp_path, monkeypatch)
    if file == "short.py":
        assert len((tmp_path / file).read_text().splitlines()) <= 10
    spec = specs(variables[file] or "accuracy,short.py:short")[-1]
    assert score(pool, spec, *completions, solution="72") == values


def test_the_page_lists_every_reward_with_its_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == sorted(BUILT_IN, key=[name for name, _ in rows].index)
    tests = (Path(__file__).parent / "test_formulas.py").read_text()
    for _, test in rows:
        assert f"def {test}(" in tests
    settings = LearnerSettings()
    for name, default in re.findall(r"\b([A-Z]+(?:_[A-Z]+)+) (-?[\d.]+|en)\b", PAGE):
        assert str(getattr(settings, name.lower())) == default, name


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("def own(prompts, completions, **kwargs): return [len(c) for c in completions]", (1, 2)),
        ("def own(completions): return (1, None)", (1.0, None)),
        ("async def own(completions, **kwargs): return [0.5 for _ in completions]", (0.5, 0.5)),
        ("async def own(completion, answer): return float(completion == answer)", (1.0, 0.0)),
        ("import numpy\ndef own(completions, level): return numpy.array(level)", (3.0, 3.0)),
        ("def own(solution_str, ground_truth): return {'score': 2}", (2, 2)),
        (
            "def own(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
            "    return float(extra_info['index']) if data_source == 'gsm8k' else -1.0",
            (7.0, 7.0),
        ),
        (
            "class own:\n    def __init__(self): self.unit = 2.0\n"
            "    def __call__(self, completions, solution, **kw): return [self.unit for _ in solution]",
            (2.0, 2.0),
        ),
        ("def own(completions, question): return [len(q) for q in question]", (3, 3)),
        (
            "import numpy, decimal\n"
            "def own(completions): return [numpy.bool_(True), decimal.Decimal('0.5')]",
            (1.0, 0.5),
        ),
        (
            "import asyncio\ngate = asyncio.Semaphore(1)\n"
            "async def one(text):\n    async with gate:\n        await asyncio.sleep(0.01)\n"
            "        return float(len(text))\n"
            "async def own(completions): return await asyncio.gather(*map(one, completions))",
            (1.0, 2.0),
        ),
        ("class own:\n    def __call__(completions, **kwargs): return [1.0, 2.0]", (1.0, 2.0)),
        (
            "class Made:\n    def __call__(self, completions, **kwargs): return [3.0, 4.0]\n"
            "orms = {'own': Made}",
            (3.0, 4.0),
        ),
        ("def own(completion_ids, **kwargs): return [len(ids) for ids in completion_ids]", (1, 2)),
        ("def own(prompts, level): return [len(prompts) + level[0]] * 2", (5.0, 5.0)),
        ("def own(**kwargs): return [len(text) for text in kwargs['completions']]", (1, 2)),
        ("def own(level, **kwargs): return level", (3.0, 3.0)),
        ("def own(response_token_ids): return [len(ids) for ids in response_token_ids]", (1, 2)),
        (
            "class Made:\n    def __init__(self, unit): self.unit = unit\n"
            "    def __call__(self, completion_ids, **kwargs):\n"
            "        return [self.unit * len(ids) for ids in completion_ids]\n"
            "def make(unit): return Made(unit)\nown = make(-0.5)",
            (-0.5, -1.0),
        ),
        ("import functools\ndef scaled(unit, completions, *, level): return [unit * v for v in level]\n"
         "own = functools.partial(scaled, 2.0)", (6.0, 6.0)),
        ("def checked(function):\n    def inner(*args, **kwargs): return function(*args, **kwargs)\n"
         "    return inner\n@checked\ndef own(completions, level, **kwargs): return level", (3.0, 3.0)),
        ("def own(completion, answer): return {'score': completion == answer}", (1.0, 0.0)),
        ("def own(completions, environments): return [environments is None] * 2", (1.0, 1.0)),
        (
            "from swift.rewards import ORM, orms\n"
            "class Made(ORM):\n"
            "    def __init__(self, args=None, **kwargs):\n        super().__init__(args, **kwargs)\n"
            "    def __call__(self, completions, **kwargs):\n"
            "        return [float(len(ids)) for ids in kwargs.get('response_token_ids')]\n"
            "orms['own'] = Made",
            (1.0, 2.0),
        ),
        (
            "from swift.rewards.orm import AsyncORM, orms\nfrom swift.utils import get_logger\n"
            "import asyncio\nlogger = get_logger()\n"
            "class own(AsyncORM):\n"
            "    def __init__(self, args):\n        super().__init__(args)\n"
            "        self.unit = 1.0 if self.args is None else 0.0\n"
            "    async def one(self, text):\n        return self.unit * len(text)\n"
            "    async def __call__(self, completions, **kwargs):\n"
            "        return list(await asyncio.gather(*map(self.one, completions)))",
            (1.0, 2.0),
        ),
        (
            "from swift.infer_engine.protocol import RolloutInferRequest\n"
            "from swift.plugin.rm_plugin import DefaultRMPlugin\n"
            "from swift.rewards import ORM, orms, rm_plugins\nimport swift.rollout.multi_turn as turns\n"
            "class Scheduler(turns.MultiTurnScheduler):\n"
            "    def check(self, asked: list[RolloutInferRequest] | None): ...\n"
            "turns.multi_turns['mine'] = Scheduler\nrm_plugins['mine'] = DefaultRMPlugin\n"
            "def own(text): return len(text)  # a helper of the same name\n"
            "class Made(ORM):\n"
            "    def __call__(self, completions, **kwargs): return list(map(own, completions))\n"
            "orms['own'] = Made",
            (1.0, 2.0),
        ),
        ("def own(model_output, ground_truth, timeout_score=0.0):\n"
         "    return float(model_output == ground_truth) + timeout_score", (1.0, 0.0)),
        ("def own(predict_str, ground_truth, use_boxed=True): return predict_str == ground_truth",
         (1.0, 0.0)),
        ("def own(solution_str, ground_truth): return solution_str == ground_truth, 'formatted'",
         (1.0, 0.0)),
        (
            "def own(data_sources, solution_strs, ground_truths, extra_infos):\n"
            "    rows = zip(data_sources, solution_strs, ground_truths, extra_infos)\n"
            "    return [len(text) + extra['index'] + (source == 'gsm8k' and gold == 'a')\n"
            "            for source, text, gold, extra in rows]",
            (9.0, 10.0),
        ),
        ("def own(solution_strs, ground_truths, **kwargs):\n"
         "    return [{'score': len(text), 'acc': True} for text in solution_strs]", (1.0, 2.0)),
    ],
    ids=["TRL", "few parameters", "async", "async pair", "array", "verl's map", "verl", "class",
         "the question's column", "scalars", "semaphore",
         "the guide's class", "orms",
         "ids", "prompts", "any argument", "a column", "ms-swift's name of the ids", "made",
         "partial", "decorated", "a map of a pair",
         "no environments", "ms-swift 4", "ms-swift 4, async", "ms-swift's other names",
         "verl's math_verify", "verl's geo3k",
         "verl's tuple", "verl's batch", "verl's batch of maps"],
)  # fmt: skip
def test_forms_that_people_have(pool: ScoringPool, tmp_path: Path, code: str, values) -> None:
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    columns = {"solution": "a", "level": 3, "data_source": "gsm8k", "extra_info": {"index": 7}}
    columns |= {"question": "1+1"}
    for _ in range(2):
        assert score(pool, spec, "a", "bb", **columns) == values


def test_what_an_async_call_left_running_ends_with_it(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "import asyncio\nleft = []\n"
        "async def later():\n    await asyncio.sleep(0.01)\n    left.append(1)\n"
        "async def own(completions):\n    tasks.append(asyncio.create_task(later()))\n"
        "    await asyncio.sleep(0.05 * (len(tasks) > 1))\n    return [len(left) for _ in completions]\n"
        "tasks = []"
    )
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    for _ in range(2):
        assert score(pool, spec, "a") == (0.0,)  # the second call has nothing of the first one


def test_a_column_called_as_an_option_does_not_replace_it(pool: ScoringPool) -> None:
    settings = LearnerSettings(rewards="soft_overlong", soft_cache_length=4, max_completion_length=8)
    (spec,) = resolve_rewards(settings)
    assert score(pool, spec, "a", soft_max_length=1) == (0.0,)


def test_a_file_may_import_what_lies_beside_it(pool: ScoringPool, tmp_path: Path) -> None:
    (tmp_path / "beside_a_reward.py").write_text("VALUE = 3.0")
    code = "from beside_a_reward import VALUE\ndef own(completions): return [VALUE for _ in completions]"
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    assert score(pool, spec, "a") == (3.0,)


def test_what_lies_beside_a_file_comes_before_what_is_on_the_path(
    pool: ScoringPool, tmp_path: Path
) -> None:
    """Penstock's own folder common/ is on the path here: the tests run in the checkout."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").touch()
    (tmp_path / "common" / "helper.py").write_text("VALUE = 4.0")
    code = "from common.helper import VALUE\ndef own(completions): return [VALUE for _ in completions]"
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    assert score(pool, spec, "a") == (4.0,)


def test_conversations_stay_conversations(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "def own(prompts, completions, **kwargs):\n"
        "    assert prompts[0][-1]['role'] == 'user'\n"
        "    return [len(completion[0]['content']) for completion in completions]"
    )
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    asked = arguments("a", "bb") | {"prompts": [[{"role": "user", "content": "q"}]] * 2}
    assert pool.score(spec, asked).values == (1.0, 2.0)


def test_a_module_by_its_dotted_name(
    pool: ScoringPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec,) = specs("tests.rewarders.bad_rewards.length_in_letters")
    assert (spec.name, spec.source) == ("length_in_letters", "tests.rewarders.bad_rewards")
    assert score(pool, spec, "abc") == (3.0,)


def test_a_package_that_replaces_itself_on_import_is_asked_for_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trl.rewards does: the module that takes its place imports a name when it is asked for."""
    folder = tmp_path / "lazyrewards" / "rewards"
    folder.mkdir(parents=True)
    (tmp_path / "lazyrewards" / "__init__.py").touch()
    (folder / "inner.py").write_text("def own(completions): return [5.0 for _ in completions]")
    (folder / "__init__.py").write_text(
        "import importlib, sys, types\n"
        "class Lazy(types.ModuleType):\n"
        "    __path__ = __path__\n"
        "    def __dir__(self): return ['own']\n"
        "    def __getattr__(self, name):\n"
        "        if name != 'own': raise AttributeError(name)\n"
        "        return getattr(importlib.import_module(self.__name__ + '.inner'), name)\n"
        "sys.modules[__name__] = Lazy(__name__)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=2, user="")) as fresh:
        spec, wrong = specs("lazyrewards.rewards.own,lazyrewards.rewards.gone")
        assert score(fresh, spec, "a") == (5.0,)
        assert "lazyrewards.rewards has no gone; the module has own" in fresh.check(wrong)


def test_the_packages_around_a_module_run_in_the_sandbox_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("graded", "spaced/inner"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rules.py").write_text(
            "import sys\nfrom .table import VALUE\n"
            "def own(completions): return [VALUE + ('graded' in sys.modules)] * len(completions)"
        )
        (tmp_path / folder / "table.py").write_text("VALUE = 1")
    (tmp_path / "graded" / "__init__.py").write_text("from . import rules")
    monkeypatch.syspath_prepend(tmp_path)
    package, space = specs("graded.rules.own") + specs("spaced.inner.rules.own")
    assert not {"graded", "spaced"} & sys.modules.keys(), "the learner ran it"
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=2)) as pool:
        assert [score(pool, spec, "a") for spec in (package, space)] == [(2.0,), (1.0,)]


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("gone.py:own", "there is no file .*gone.py"),
        ("nosuchpackage.own", "there is no module nosuchpackage here"),
        ("nosuchpackage.module.own", "there is no module nosuchpackage.module here"),
        ("json.decoder.inside.own", "there is no module json.decoder.inside here"),
    ],
)
def test_code_that_is_not_there_is_told_by_the_learner(variable: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        specs(variable)


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("acuracy", "there is no reward 'acuracy': did you mean accuracy"),
        ("a.py:f,b.py:f", "two rewards have the same name"),
        ("own.py:", "names no function"),
        ("own.py", "names no function"),
        ("own.py:state", "a reward cannot be called state"),
        ("soft_overlong", "set LEARNER_SOFT_CACHE_LENGTH"),
        ("language_consistency", "LEARNER_TARGET_LANGUAGE: 'xx' is not known"),
    ],
)
def test_a_wrong_name_is_told_at_once(variable: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LearnerSettings(rewards=variable, target_language="xx")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(completions): ...", "has no own; the module has other"),
        ("own = 3", "reward own is a int; expected a function or a class"),
        ("def own(a, b, c): ...", "is of no known form"),
        ("def own(answer, completion): ...", "is of no known form"),
        ("def own(completion, **kwargs): ...", "is of no known form"),
        ("def own(max_completion_len, soft_punish_cache): ...", "call it in a file of yours"),
        (
            "from swift.template import Template\nown = Template()",
            "the reward's code uses swift.template.Template, and ms-swift",
        ),
        ("from swift.llm import Ours\nclass Own(Ours): ...\norms = {'own': Own}", "is not installed"),
        ("import nosuchpackage", "No module named 'nosuchpackage'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def own(:", "SyntaxError"),
    ],
)
def test_code_that_does_not_fit_is_told_before_any_scoring(
    pool: ScoringPool, tmp_path: Path, code: str, words: str
) -> None:
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    assert words in pool.check(spec)


def test_code_that_changed_since_the_learner_saw_it_is_refused(
    pool: ScoringPool, tmp_path: Path
) -> None:
    path = write(tmp_path, "def own(completions): return [1.0]")
    (spec,) = specs(f"{path}:own")
    path.write_text("def own(completions): return [0.0]")
    assert "differs from the learner's" in pool.check(spec)
    assert spec.digest == hashlib.sha256(b"def own(completions): return [1.0]").hexdigest()


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("def own(completions, level): ...", "level"),
        ("def own(completions, *, level, depth, **kwargs): ...", "level, depth"),
        ("def own(infer_requests, **kwargs): ...", "infer_requests"),
        ("def own(completion, answer): ...", "solution"),
        ("def own(output, lvl): ...", "lvl"),
        ("def own(response, ground_truth): ...", "solution"),
        ("def own(solution_str, ground_truth): ...", "solution"),
        ("def own(completions, prompts, completion_ids, trainer_state, environments): ...", ""),
        ("def own(question, log_extra, log_metric, level=1, **kwargs): ...", ""),
    ],
)
def test_a_required_argument_that_is_no_column_is_told_before_any_scoring(
    pool: ScoringPool, tmp_path: Path, code: str, missing: str
) -> None:
    source = f"{write(tmp_path, code)}:own"
    (spec,) = resolve_rewards(LearnerSettings(rewards=source), {"columns": ["question", "answer"]})
    found = pool.check(spec)
    there = "which is no column of the data; the data has question, answer"
    expected = f"reward own requires {missing}, {there}"
    assert expected in found if missing else found == ""


@pytest.mark.parametrize(
    ("form", "prompt", "expected"),
    [
        ("auto", "q", "text"),
        ("auto", [{"role": "user", "content": "q"}], "messages"),
        ("messages", "q", "messages"),
        ("messages", [{"role": "user", "content": "q"}], "messages"),
        ("text", "q", "text"),
        ("text", [{"role": "user", "content": "q"}], "text"),
    ],
)
def test_one_variable_chooses_the_form_of_the_completions(
    pool: ScoringPool, tmp_path: Path, form: str, prompt: object, expected: str
) -> None:
    code = (
        "def own(prompts, completions, **kwargs):\n"
        "    if isinstance(completions[0], str): return [1.0]\n"
        "    assert prompts == [[{'role': 'user', 'content': 'q'}]]\n"
        "    return [2.0 * (completions == [[{'role': 'assistant', 'content': 'a'}]])]\n"
        "class InTexts:\n"
        "    def __call__(self, completions, **kwargs): return [3.0 * (completions == ['a'])]\n"
        "def listed(completions, **kwargs): return [4.0 * (completions == ['a'])]\n"
        "orms = {'registered': listed}"
    )
    path = write(tmp_path, code)
    names = f"{path}:own,{path}:InTexts,{path}:registered"
    settings = LearnerSettings(rewards=names, reward_completions=form)
    asked = arguments("a") | {"prompts": [prompt]}
    values = [pool.score(spec, asked).values for spec in resolve_rewards(settings)]
    assert values == [(1.0,) if expected == "text" else (2.0,), (3.0,), (4.0,)]


def test_a_reward_gets_the_step_and_the_number_of_steps(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "def own(completions, trainer_state):\n"
        "    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]"
    )
    (spec,) = specs(f"{write(tmp_path, code)}:own")
    assert score(pool, spec, "a", trainer_state={"global_step": 3, "max_steps": 4}) == (0.75,)


def test_a_column_that_is_not_there_is_a_failure(pool: ScoringPool, tmp_path: Path) -> None:
    (spec,) = specs(f"{write(tmp_path, 'def own(completions, level): return level')}:own")
    with pytest.raises(ScoringFailed, match="level"):
        score(pool, spec, "a")
