"""Held-out examples are never trained on, and depend on the ids of the examples alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nalora
from nalora.tasks import Example
from nalora.tasks.image_splits import ImageSplit
from nalora.tasks.splits import hold_out, hold_out_indices


@given(st.lists(st.text(min_size=1), unique=True, min_size=2, max_size=40), st.data())
def test_both_parts_together_are_all_examples(ids, data):
    size = data.draw(st.integers(0, len(ids) - 1))
    examples = [Example(each, f"{each}?") for each in ids]
    train, held = hold_out(examples, size)
    assert len(held) == size
    assert sorted([*train, *held], key=lambda each: each.id) == sorted(examples, key=lambda each: each.id)
    assert train == [each for each in examples if each in train]


def test_the_choice_does_not_depend_on_order_and_hardly_on_growth():
    examples = [Example(f"example-{i}", f"{i}?") for i in range(1000)]
    shuffled = random.Random(0).sample(examples, 1000)
    held = {each.id for each in hold_out(examples, 100)[1]}
    assert held == {each.id for each in hold_out(shuffled, 100)[1]}
    more = [*examples, *(Example(f"new-{i}", f"new {i}?") for i in range(50))]
    assert len(held & {each.id for each in hold_out(more, 100)[1]}) >= 85


def test_held_out_examples_are_drawn_from_all_parts():
    """Data sets are sorted by source, length or class, and so are their ids."""
    held = hold_out([Example(f"example-{i:04}", f"{i}?") for i in range(1000)], 100)[1]
    quarters = [sum(q * 250 <= int(each.id[-4:]) < (q + 1) * 250 for each in held) for q in range(4)]
    assert min(quarters) >= 10


def test_copies_of_held_out_examples_are_not_trained_on():
    """A generator with few questions draws each of them again and again."""
    examples = [Example(f"draw-{i}", f"{i % 150}?", f"{i % 150}!") for i in range(1000)]
    train, held = hold_out(examples, 100)
    assert len(held) == 100
    assert not {each.prompt for each in train} & {each.prompt for each in held}
    asked = {each.prompt for each in held}
    assert train == [each for each in examples if each.prompt not in asked]


def test_one_prompt_with_many_answers_is_not_one_example():
    examples = [Example(f"poem-{i}", "A poem, please.", f"Poem {i}") for i in range(50)]
    train, held = hold_out(examples, 10)
    assert (len(train), len(held)) == (40, 10)


def test_training_sets_of_copies_only_are_refused():
    with pytest.raises(nalora.NALoRAError, match="all of them copies"):
        hold_out([Example(f"{i}", "?") for i in range(10)], 3)


def test_everything_cannot_be_held_out():
    with pytest.raises(nalora.NALoRAError, match="fewer held-out"):
        hold_out([Example("one", "?")], 1)


def test_images_are_split_by_their_ids_and_none_is_decoded():
    class Encoded(list):
        fetched = 0

        def __getitem__(self, place):
            self.fetched += 1
            return super().__getitem__(place)

    images = Encoded(f"image {i}" for i in range(50))
    ids = [f"set/train/{i}" for i in range(50)]
    pictures = ImageSplit(ids, images, list(range(50)))
    train, held = (pictures.at(places) for places in hold_out_indices(pictures.ids, 20))
    assert images.fetched == 0
    assert (len(train), len(held)) == (30, 20)
    assert held.ids == [each.id for each in hold_out([Example(id, "") for id in ids], 20)[1]]
    assert [each.image for each in held] == [f"image {each.label}" for each in held]
    assert [each.id for each in train[:3]] == train.ids[:3]
