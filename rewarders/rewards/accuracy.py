"""The rewards for right answers.

If the gold answer cannot be read, each of these rewards is None for the whole group; the other rewards
still train the group.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from penstock.rewarders.rewards.answers import all_boxes, final_answer, last_box, marked_part
from penstock.rewarders.rewards.equality import same
from penstock.rewarders.rewards.form import has_structure
from penstock.rewarders.rewards.lengths import half_cosine, relative_lengths
from penstock.rewarders.rewards.parts import has_phrase, is_prose, last_part, said_in_words
from penstock.rewarders.rewards.values import (
    Choice,
    Group,
    NumberValue,
    Value,
    are_apart,
    is_defined,
    read_value,
)
from penstock.rewarders.rewards.words import directions, has_sentence

_MARKS = re.compile("</?(?:answer|think)>|####")
GOLD_TYPES = (str, int, float)
"""The types of gold solutions, alone or in a list."""


def accuracy(
    prompts: list[Any], completions: list[str], solution: list[Any], **columns: Any
) -> list[float | None]:
    """Return 1.0 for each completion whose answer equals the group's gold answer, solution[0], else 0.0.

    All get None if the gold answer cannot be read. `prompts` and `columns` are ignored. Raise
    MemoryError or RecursionError, as sympy does.
    Example: for "#### 72", "<answer>72</answer>" gets 1.0, "71" gets 0.0.
    """
    return _by_verdict(completions, solution, lambda _, right: float(right))


def acc(
    prompts: list[Any], completions: list[str], solution: list[Any], **columns: Any
) -> list[float | None]:
    """Return 1.0 where the last box holds the gold answer, -0.5 for another box, -1.0 without a box.

    A box is \\boxed{} in a completion. The group's gold answer is solution[0]; if it cannot be read, all
    get None. `prompts` and `columns` are ignored. Raise MemoryError or RecursionError, as sympy does.
    """
    gold = read_gold(solution[0])
    if gold is None:
        return [None] * len(completions)
    boxes = [last_box(completion) for completion in completions]
    bare = [box and _MARKS.sub(" ", box) for box in boxes]
    return [
        -1.0 if box is None else 1.0 if is_right(gold, rf"\boxed{{{box}}}") else -0.5 for box in bare
    ]


def base_acc(
    prompts: list[Any], completions: list[str], solution: list[Any], **columns: Any
) -> list[float | None]:
    """Return 1.0 for a right answer in a completion <think>..</think><answer>..</answer>, else 0.0.

    Only white space may be beside. The group's gold answer is solution[0]; if it cannot be read, all get
    None. `prompts` and `columns` are ignored. Raise MemoryError or RecursionError, as sympy does.
    Example: "<answer>72</answer>" gets 0.0.
    """
    return _by_verdict(
        completions, solution, lambda index, right: float(right and has_structure(completions[index]))
    )


def cosine(
    prompts: list[Any],
    completions: list[str],
    completion_ids: list[list[int]],
    solution: list[Any],
    cosine_max_len: int,
    cosine_min_len_value_wrong: float = -0.5,
    cosine_max_len_value_wrong: float = 0.0,
    cosine_min_len_value_correct: float = 1.0,
    cosine_max_len_value_correct: float = 0.5,
    **columns: Any,
) -> list[float | None]:
    """Return for each completion a value by correctness and number of tokens, `completion_ids`.

    The `min_len` values are those at length 0, the `max_len` values those from `cosine_max_len` tokens
    on, which is above 0; half a cosine joins them. By default right answers lose with length, wrong ones
    gain. The group's gold answer is solution[0]; if it cannot be read, all get None. `prompts` and
    `columns` are ignored. Raise MemoryError or RecursionError, as sympy does.
    Example: with the defaults and cosine_max_len 100, a right answer of 50 tokens gets 0.75, a wrong one
    -0.25.
    """

    def value(index: int, right: bool) -> float:
        """Return what the completion at `index` gets by its number of tokens, see `half_cosine`.

        `right` chooses the two end values: those of right answers, or else those of wrong ones.
        """
        wrong_ends = (cosine_min_len_value_wrong, cosine_max_len_value_wrong)
        right_ends = (cosine_min_len_value_correct, cosine_max_len_value_correct)
        ends = right_ends if right else wrong_ends
        return half_cosine(len(completion_ids[index]), cosine_max_len, *ends)

    return _by_verdict(completions, solution, value)


def length(
    prompts: list[Any],
    completions: list[str],
    completion_ids: list[list[int]],
    solution: list[Any],
    **columns: Any,
) -> list[float | None]:
    """Return 0.5 for the group's shortest completion to -0.5 for its longest, linearly between.

    Lengths are numbers of tokens, from `completion_ids`. All get 0.0 if all are equally long. Wrong
    answers get at most 0. The gold answer is solution[0]; if it cannot be read, all get None. `prompts`
    and `columns` are ignored. Raise MemoryError or RecursionError, as sympy does.
    """
    gold = read_gold(solution[0])
    if gold is None:
        return [None] * len(completions)
    right = [is_right(gold, completion) for completion in completions]
    return list(relative_lengths([len(ids) for ids in completion_ids], right))


def read_gold(solution: Any) -> Value | None:
    """Return the value of a gold answer, None if it cannot be read or divides by zero.

    `solution` is a text or number, or a list of these. A text with several different boxes is a list of
    their values. A list of one item is that item. Raise MemoryError or RecursionError, as sympy does.
    """
    if isinstance(solution, (list, tuple)) and len(solution) == 1:
        return read_gold(solution[0])
    if isinstance(solution, (list, tuple)) and all(isinstance(item, GOLD_TYPES) for item in solution):
        items = tuple(value for item in solution if (value := read_gold(item)))
        is_whole = 0 < len(items) == len(solution)
        return Group(", ".join(map(str, solution)), items=items) if is_whole else None
    if not isinstance(solution, GOLD_TYPES) or (isinstance(solution, float) and math.isnan(solution)):
        return None
    text = str(solution)
    boxes = list(dict.fromkeys(all_boxes(marked_part(text))))
    if len(boxes) > 1:
        return _list(boxes)
    gold = next(_readings(text), None)
    return gold if gold is not None and is_defined(gold) else None


def is_right(gold: Value, answer: str) -> bool:
    """Return whether the answer in the text `answer` equals the gold answer's value.

    The last box of a text is read, else its marked or last part. For a gold answer of several values the
    last boxes, as many as there are values, are first compared as a list, if there are two or more.
    False if no answer can be read. Raise MemoryError or RecursionError, as sympy does.
    """
    if isinstance(gold, Group) and (boxes := all_boxes(marked_part(answer))[-len(gold.items) :])[1:]:
        boxed = _list(boxes)
        if boxed and same(gold, boxed):
            return True
    return any(same(gold, reading) for reading in _readings(answer))


def _list(boxes: list[str]) -> Value | None:
    """Return the values of the texts inside boxes as one list of values; None if one cannot be read.

    Raise MemoryError or RecursionError, as sympy does.
    """
    values = tuple(value for value in map(read_value, boxes) if value)
    return Group(", ".join(boxes), items=values) if len(values) == len(boxes) else None


def _readings(text: str) -> Iterator[Value]:
    """Yield the values that a text's answer may have, the likeliest first: two, one or none.

    The first is the value of the last box, else of the marked text, else of the whole text. If words are
    there too, the second is the value of the last part, such as "5" of "so it is 5". Several sentences
    give the last part alone, and so do two numbers that differ ("we get 3 ≈ 7" is 7) and a choice with
    "answer is" beside it. Any other choice, and a box, give one value. "Yes, as 4 is even" also
    gives yes. Raise MemoryError or RecursionError, as sympy does.
    """
    answer = final_answer(text)
    box = last_box(answer)
    inside = answer if box is None else box
    has_part = is_prose(inside) or has_sentence(inside) or "\n" in inside.strip()
    part = last_part(inside) if has_part else ""
    whole = None if part and is_prose(inside) else read_value(inside)
    if isinstance(whole, Choice) and part:  # "A. The answer is B" is B; "(B), as 5 are left" is B too
        whole, part = (None, part) if has_phrase(inside) else (whole, "")
    alone = whole is not None and (box is not None or _has_quantities(whole))
    last = read_value(part) if part and not alone else None
    if whole is not None and not (last and are_apart(whole, last)):
        yield whole
    if last is not None:
        yield last if is_prose(inside) else replace(last, sides=directions(inside))
    if box is None and (said := read_value(said_in_words(inside))):
        yield replace(said, sides=directions(inside))


def _has_quantities(value: Value) -> bool:
    """Return whether a value is several numbers with a word behind each: 5 apples and 6 oranges."""
    items = (
        value.items if isinstance(value, Group) and re.search(r"\d [a-z]+ and \d", value.text) else ()
    )
    return bool(items) and all(isinstance(item, NumberValue) and item.label for item in items)


def _by_verdict(
    completions: list[str], solution: list[Any], value: Callable[[int, bool], float]
) -> list[float | None]:
    """Return value(index, whether its answer is right) for each completion, in order of `index`.

    All get None if the gold answer, solution[0], cannot be read. Raise MemoryError or RecursionError, as
    sympy does.
    """
    gold = read_gold(solution[0])
    if gold is None:
        return [None] * len(completions)
    return [value(index, is_right(gold, text)) for index, text in enumerate(completions)]
