"""Clips show what their scene says, and the scorer tells it from pixels alone."""

import itertools

import pytest
import torch
from shapes import (
    CAPTION_TEMPLATES,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Pair,
    Scene,
    all_scenes,
    attribute_matches,
    draw_clips,
    held_out_pairs,
    held_out_scenes,
    is_held_out,
    read_clips,
    read_pairs,
    signed_distance,
    train_pairs,
    train_scenes,
)


def share_right(clips: torch.Tensor, scenes: list[Scene]) -> dict[str, float]:
    return {name: sum(hits) / len(hits) for name, hits in attribute_matches(read_clips(clips), scenes).items()}


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    return draw_clips(all_scenes(), generator=torch.Generator().manual_seed(3))


PAIRS = held_out_pairs()[::4]


@pytest.fixture(scope="module")
def crossing() -> torch.Tensor:
    return draw_clips(PAIRS, generator=torch.Generator().manual_seed(3))


@pytest.mark.audit
def test_drawn_clips_are_read_right_in_at_least_95_percent_for_every_attribute(drawn):
    for name, share in share_right(drawn, all_scenes()).items():
        assert share >= 0.95, name


@pytest.mark.audit
def test_reading_survives_noise_and_blur(drawn):
    clips = drawn[::3]
    noisy = clips + 0.05 * torch.randn(clips.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool3d(noisy.flatten(0, 1), (1, 5, 5), stride=1, padding=(0, 2, 2))
    for name, share in share_right(blurred.view_as(clips).clamp(0, 1), all_scenes()[::3]).items():
        assert share >= 0.95, name


def test_a_clip_played_backwards_reads_as_the_opposite_direction(drawn):
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}
    scenes = all_scenes()[::5]
    expected = [scene._replace(direction=opposite[scene.direction]) for scene in scenes]
    assert read_clips(drawn[::5].flip(1)) == expected


def test_a_transposed_clip_reads_as_the_transposed_direction(drawn):
    transposed = {"left": "up", "right": "down", "up": "left", "down": "right"}
    readings = read_clips(drawn[::5].transpose(-1, -2))
    assert [r.direction for r in readings] == [transposed[s.direction] for s in all_scenes()[::5]]


def test_exchanged_colour_channels_read_as_the_exchanged_colour():
    clips = draw_clips([Scene("red", "cross", "up")], generator=torch.Generator().manual_seed(0))
    assert read_clips(clips[:, :, [2, 1, 0]])[0].colour == "blue"


def test_empty_clips_are_not_read_and_still_clips_have_no_direction(drawn):
    unread = Scene(None, None, None)
    generator = torch.Generator().manual_seed(0)
    assert read_clips(torch.full((1, 17, 3, 64, 64), 0.1)) == [unread]
    assert read_clips(torch.rand(1, 17, 3, 64, 64, generator=generator)) == [unread]
    still = drawn[:1, :1].expand(1, 17, -1, -1, -1)
    assert read_clips(still) == [all_scenes()[0]._replace(direction=None)]


def test_clips_of_the_wrong_layout_are_refused():
    with pytest.raises(ValueError, match=r"\(batch, frames, 3, size, size\).*\(1, 3, 17, 64, 64\)"):
        read_clips(torch.zeros(1, 3, 17, 64, 64))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_area_of_the_unit_circle_and_its_centroid_at_the_origin(shape):
    axis = torch.linspace(-2, 2, 801, dtype=torch.float64)
    x, y = axis[None, :].expand(801, 801), axis[:, None].expand(801, 801)
    inside = (signed_distance(shape, x, y) < 0).double()
    # A pixel column on each side of an outline at most 4 x the circle's bounds the error of counting pixels.
    tolerance = 4 * 2 * torch.pi * 0.005
    assert inside.sum().item() * 0.005**2 == pytest.approx(torch.pi, abs=tolerance)
    assert (inside * x).sum().item() * 0.005**2 == pytest.approx(0, abs=tolerance)
    assert (inside * y).sum().item() * 0.005**2 == pytest.approx(0, abs=tolerance)


def test_the_object_never_leaves_the_frame():
    clips = draw_clips(all_scenes(), generator=torch.Generator().manual_seed(11))
    border = torch.cat([clips[..., 0, :], clips[..., -1, :], clips[..., :, 0], clips[..., :, -1]], -1).amax(2)
    # The dimmest shape's brightest channel is green's 0.75 x 0.85: a border pixel half inside a shape shows half of it.
    assert clips.amax((2, 3, 4)).min() >= 0.75 * 0.85
    assert border.max() < 0.75 * 0.85 / 2


def test_48_scenes_are_held_out_and_every_pair_of_attributes_occurs_in_training():
    held_out, training = held_out_scenes(), train_scenes()
    assert len(held_out) == 48
    assert set(held_out) | set(training) == set(all_scenes()) and not set(held_out) & set(training)
    for first, second in itertools.combinations(range(3), 2):
        grids = (list(COLOURS), list(SHAPES), list(DIRECTIONS))
        pairs = {(scene[first], scene[second]) for scene in training}
        assert pairs == set(itertools.product(grids[first], grids[second]))


def test_the_same_seed_draws_the_same_clips_and_another_seed_others():
    def draw(seed: int) -> torch.Tensor:
        return draw_clips(train_scenes()[:3], generator=torch.Generator().manual_seed(seed), num_frames=5, size=32)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_captions_name_every_attribute_and_start_with_the_canonical_wording():
    assert Scene("red", "circle", "left").caption() == "a red circle moving left"
    assert Scene("orange", "cross", "up").caption() == "an orange cross moving up"
    for scene, template in itertools.product(all_scenes()[::7], CAPTION_TEMPLATES):
        assert set(scene) <= set(scene.caption(template).split())


def as_sets(pairs: list[Pair]) -> list[set[Scene]]:
    return [set(pair) for pair in pairs]


def test_both_objects_of_a_drawn_pair_are_read_right(crossing):
    assert as_sets(read_pairs(crossing)) == as_sets(PAIRS)
    for name, hits in attribute_matches(read_pairs(crossing), PAIRS).items():
        assert all(hits), name


def test_reading_pairs_survives_noise_and_blur(crossing):
    noisy = crossing + 0.05 * torch.randn(crossing.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool3d(noisy.flatten(0, 1), (1, 5, 5), stride=1, padding=(0, 2, 2))
    readings = read_pairs(blurred.view_as(noisy).clamp(0, 1))
    for name, hits in attribute_matches(readings, PAIRS).items():
        assert sum(hits) >= 11, name


def test_one_object_is_not_read_as_a_pair(drawn):
    unread = Scene(None, None, None)
    scenes, readings = all_scenes()[::16], read_pairs(drawn[::16])
    assert readings == [Pair(scene, unread) for scene in scenes]
    assert read_pairs(torch.full((1, 17, 3, 64, 64), 0.1)) == [Pair(unread, unread)]
    asked = [Pair(scene, scene._replace(colour="red" if scene.colour != "red" else "blue")) for scene in scenes]
    assert not any(attribute_matches(readings, asked)["colour"])


@pytest.mark.parametrize("attribute", Scene._fields)
def test_an_attribute_that_the_two_objects_have_exchanged_is_not_right(attribute):
    pair = Pair(Scene("red", "circle", "left"), Scene("blue", "square", "right"))
    first, second = (getattr(scene, attribute) for scene in pair)
    exchanged = Pair(pair.first._replace(**{attribute: second}), pair.second._replace(**{attribute: first}))
    wrong = {name for name, hits in attribute_matches([exchanged], [pair]).items() if not hits[0]}
    # Exchanged colours are an exchange of everything else.
    expected = {"colour": {"shape", "direction"}, "shape": {"shape"}, "direction": {"direction"}}[attribute]
    assert wrong - {"colour and direction"} == expected
    assert ("colour and direction" in wrong) == ("direction" in expected)
    assert all(hits[0] for hits in attribute_matches([Pair(*reversed(pair))], [pair]).values())


def test_the_objects_of_a_pair_cross_and_the_second_covers_the_first(crossing):
    for pair, clip in zip(PAIRS, crossing, strict=True):
        both = [draw_mask(clip, scene.colour) for scene in pair]
        areas = torch.stack([mask.sum((-2, -1)) for mask in both])
        whole = areas.amax(1, keepdim=True)
        assert (areas[:, [0, -1]] > 0.9 * whole).all(), pair
        assert (areas[1] > 0.9 * whole[1]).all(), pair
        assert areas[0].min() < 0.9 * whole[0], pair


def draw_mask(clip: torch.Tensor, colour: str) -> torch.Tensor:
    """Return where a clip (F, 3, H, W) shows a colour at one brightness or another."""
    expected = torch.tensor(COLOURS[colour])
    pixels = clip.movedim(1, -1)
    bright = pixels.amax(-1, keepdim=True)
    return ((pixels / bright - expected / expected.max()).norm(dim=-1) < 0.1) & (bright[..., 0] > 0.5)


def test_no_object_of_a_pair_leaves_the_frame(crossing):
    border = torch.cat([crossing[..., 0, :], crossing[..., -1, :], crossing[..., :, 0], crossing[..., :, -1]], -1)
    assert border.max() < 0.75 * 0.85 / 2


def test_a_pair_is_held_out_if_one_of_its_scenes_is():
    assert len(train_pairs()) == len(set(train_pairs())) > 4000
    assert not any(is_held_out(scene) for pair in train_pairs() for scene in pair)
    assert [pair.first for pair in held_out_pairs()] == held_out_scenes()
    for first, second in [*held_out_pairs(), *train_pairs()]:
        assert first.colour != second.colour and first.direction != second.direction
    assert {scene.shape for pair in held_out_pairs() for scene in pair} == set(SHAPES)


def test_the_caption_of_a_pair_names_both_in_order():
    pair = Pair(Scene("orange", "circle", "left"), Scene("orange", "square", "right"))
    assert pair.caption() == "an orange circle moving left and an orange square moving right"
    for template in CAPTION_TEMPLATES:
        first, second = pair.caption(template).split(" and ")
        assert (first, second) == (pair.first.caption(template), pair.second.caption(template))
