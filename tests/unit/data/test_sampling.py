"""Datasets: parity with megatron-core's own, mock data, building from options, and the errors."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron_snip.data.sampling import (
    BlendedDataset,
    GPTDataset,
    MockDataset,
    Repeated,
    build_datasets,
    parse_blend,
)
from megatron_snip.train.setup import build_loaders

VOCABULARY = 1000


def write(prefix, documents, seed, longest, dtype=np.uint16):
    random = np.random.RandomState(seed)
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for _ in range(documents):
            builder.add_document(random.randint(0, VOCABULARY, size=random.randint(0, longest)))
    return str(prefix)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three corpora of different sizes, some documents empty."""
    folder = tmp_path_factory.mktemp("corpora")
    shapes = {"a": (157, 90), "b": (300, 40), "c": (110, 300)}
    return {name: write(folder / name, n, seed, longest) for seed, (name, (n, longest)) in enumerate(shapes.items())}


def build(paths=(), split="99,1,0", train=20, valid=0, seq_length=16, **options):
    settings = {
        "train_paths": [],
        "valid_paths": [],
        "data_path": list(paths),
        "split": split,
        "mock": False,
        "num_train_samples": train,
        "num_valid_samples": valid,
        "seq_length": seq_length,
        "seed": 1234,
        "vocab_size": VOCABULARY,
        "cache_path": None,
    }
    return build_datasets(**{**settings, **options})


def every(dataset):
    return np.stack([dataset[i] for i in range(len(dataset))])


def test_one_epoch_holds_every_token_once(corpora):
    """Samples put back in the stream's order are the corpus, in some order of its documents."""
    indexed = IndexedDataset(corpora["a"])
    dataset = GPTDataset(indexed, (0, len(indexed)), 1, 8, 0)
    assert len(dataset) == (indexed.num_tokens - 1) // 8
    samples = every(dataset)
    assert samples.dtype == np.int64 and samples.shape == (len(dataset), 9)
    in_order = samples[np.argsort(dataset.shuffle_index)]
    assert np.array_equal(in_order[1:, 0], in_order[:-1, -1])
    stream = np.concatenate([indexed.get(int(d)) for d in dataset.document_index])
    assert np.array_equal(in_order[:, :-1].ravel(), stream[: 8 * len(dataset)])
    assert sorted(dataset.document_index.tolist()) == list(range(len(indexed)))
    assert not np.array_equal(dataset.document_index, np.arange(len(indexed)))


def test_the_seed_decides_the_order(corpora):
    indexed = IndexedDataset(corpora["a"])
    first, again, other = (every(GPTDataset(indexed, (0, 100), 50, 16, seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_samples_come_from_the_range_only(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        for document in range(20):
            builder.add_document([document] * 10)
    dataset = GPTDataset(IndexedDataset(tmp_path / "a"), (5, 8), 30, 8, 0)
    assert set(every(dataset).ravel().tolist()) == {5, 6, 7} and len(dataset) >= 30
    with pytest.raises(IndexError, match="none is number"):
        dataset[len(dataset)]
    with pytest.raises(IndexError):
        dataset[-1]


def test_the_cache_changes_nothing(corpora, tmp_path):
    paths = ["3", corpora["a"], "1", corpora["b"]]
    plain, _ = build(paths, train=300)
    for _ in range(2):
        kept, _ = build(paths, train=300, cache_path=tmp_path)
        assert np.array_equal(every(kept), every(plain))
    entries = len(list(tmp_path.glob("*.json")))
    assert entries == 3  # two corpora and their blend
    build(paths, train=300, cache_path=tmp_path, seed=7)
    assert len(list(tmp_path.glob("*.json"))) == entries + 2  # a blend does not depend on the seed


def test_the_cache_sees_new_data_under_an_old_name(tmp_path):
    """As many sequences and tokens as before, but cut elsewhere."""
    for seed in (0, 1):
        random = np.random.RandomState(seed)
        with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
            for length in random.permutation(np.arange(1, 41)):
                builder.add_document(random.randint(0, VOCABULARY, size=length))
        if seed == 0:
            build([str(tmp_path / "a")], split="1", cache_path=tmp_path / "cache")
    kept, _ = build([str(tmp_path / "a")], split="1", cache_path=tmp_path / "cache")
    plain, _ = build([str(tmp_path / "a")], split="1")
    assert np.array_equal(every(kept), every(plain))


def test_blend_keeps_its_weights(tmp_path):
    paths = []
    for token, weight in ((1, "2"), (2, "6")):
        with IndexedDatasetBuilder(tmp_path / str(token), np.uint16) as builder:
            builder.add_document([token] * 500)
        paths += [weight, str(tmp_path / str(token))]
    train, _ = build(paths, split="1", train=400)
    shares = np.bincount(every(train)[:, 0])[1:] / len(train)
    assert np.allclose(shares, [0.25, 0.75], atol=0.01) and len(train) == 400
    with pytest.raises(IndexError, match="the blend has 400"):
        train[400]


def test_datasets_of_their_own(corpora):
    train, valid = build(train_paths=[corpora["a"]], valid_paths=[corpora["b"]], valid=5)
    for dataset, name in ((train, "a"), (valid, "b")):
        indexed = IndexedDataset(corpora[name])
        assert len(dataset.document_index) == len(indexed) and dataset.indexed.prefix == corpora[name]
    assert build(train_paths=[corpora["a"]], valid=5)[1] is None
    assert build([corpora["a"]], split="100,0,0", valid=5)[1] is None
    assert build([corpora["a"]], split="50,50", valid=0)[1] is None


def test_validation_is_disjoint(corpora):
    train, valid = build([corpora["c"]], split="90,10", valid=3)
    assert not set(train.document_index.tolist()) & set(valid.document_index.tolist())


ERRORS = {
    "missing": ({"paths": ["nowhere/x"]}, r"nowhere/x\.idx"),
    "odd blend": ({"paths": ["1", "A", "2"]}, "3 items"),
    "weight": ({"paths": ["x", "A"]}, "'x' where a positive weight"),
    "negative weight": ({"paths": ["-1", "A"]}, "'-1' where a positive weight"),
    "infinite weight": ({"paths": ["inf", "A"]}, "'inf' where a positive weight"),
    "too small": ({"paths": ["A"], "seq_length": 10**6}, "less than one sample of 1000001"),
    "no sequence left": (
        {"paths": ["A"], "split": "99999,1", "valid": 3},
        "leaves no sequence .* for validation",
    ),
    "no training": ({"paths": ["A"], "split": "0,1"}, "training a share of 0"),
    "mock vocabulary": ({"mock": True, "vocab_size": 1}, "vocabulary of 1"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_clear_line(case, corpora):
    options, message = ERRORS[case]
    names = {"A": corpora["a"], "B": corpora["b"]}
    options = {k: [names.get(p, p) for p in v] if isinstance(v, list) else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "bad"), [(np.uint16, 50), (np.int32, -1)])
def test_ids_outside_the_vocabulary_are_named(tmp_path, dtype, bad):
    with IndexedDatasetBuilder(tmp_path / "a", dtype) as builder:
        builder.add_document([*range(50), bad] * 2)
    indexed = IndexedDataset(tmp_path / "a")
    good, checked = (GPTDataset(indexed, (0, 1), 1, 64, 0, vocab_size=size) for size in (None, 50))
    assert good[0].shape == (65,)
    with pytest.raises(ValueError, match=rf"dataset .*a holds token id {bad}, outside the vocabulary of 50"):
        checked[0]
    if bad > 0:
        assert GPTDataset(indexed, (0, 1), 1, 64, 0, vocab_size=51)[0].max() == 50


def test_floats_are_no_tokens(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", np.float32) as builder:
        builder.add_document([0.5] * 40)
    with pytest.raises(ValueError, match="float32, which are not token ids"):
        build([str(tmp_path / "a")], split="1")


def test_a_blend_that_takes_too_much_is_refused(corpora):
    indexed = IndexedDataset(corpora["a"])
    small = GPTDataset(indexed, (0, 10), 1, 16, 0)
    with pytest.raises(ValueError, match=r"takes \d+ samples from its dataset 1"):
        BlendedDataset([GPTDataset(indexed, (0, 157), 1, 16, 0), small], [1.0, 1.0], 2 * len(small) + 4)


def test_parse_blend():
    assert parse_blend(["p"]) == (["p"], None)
    assert parse_blend(["0.5", "p", "2", "q"]) == (["p", "q"], [0.5, 2.0])


class TestMock:
    def test_fixed_values(self):
        """These must never change: runs on mock data are compared across machines and versions."""
        sample = MockDataset(1000, 15, 1234)[3]
        assert sample.dtype == np.int64
        assert sample.tolist() == [*range(449, 459), *range(91, 97)]

    def test_depends_on_seed_index_and_stream_alone(self):
        def one(**options):
            settings = {"vocab_size": 500, "seq_length": 64, "seed": 5, **options}
            index = settings.pop("index", 2)
            return MockDataset(**settings)[index].tolist()

        assert one() == one()
        assert len({tuple(one(**o)) for o in ({}, {"seed": 6}, {"index": 3}, {"stream": 1})}) == 4

    def test_can_be_learned(self):
        samples = np.stack([MockDataset(100, 256, 0)[i] for i in range(50)])
        assert samples.min() >= 0 and samples.max() < 100
        counted = np.mean(samples[:, 1:] == (samples[:, :-1] + 1) % 100)
        assert 0.85 < counted < 0.92

    def test_length(self):
        dataset = MockDataset(10, 4, 0)
        assert len(dataset) > 10**15
        with pytest.raises(IndexError):
            dataset[-1]

    def test_from_options(self):
        train, valid = build(mock=True, valid=4)
        assert train[0].shape == (17,) and not np.array_equal(train[0], valid[0])
        assert build(mock=True)[1] is None


class TestWithMegatron:
    """Sample for sample against megatron-core's builder, GPTDataset and BlendedDataset."""

    @pytest.fixture(autouse=True)
    def megatron(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("megatron.core")
            self.gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
            self.builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
            self.utils = pytest.importorskip("megatron.core.datasets.utils")
            pytest.importorskip("megatron.core.datasets.helpers", reason="its C++ helpers are not compiled")

    def config(self, cache, seq_length, **blend):
        tokenizer = SimpleNamespace(vocab_size=VOCABULARY, eod=0, pad=-1, unique_identifiers={}, special_tokens_dict={})
        return self.gpt.GPTDatasetConfig(
            random_seed=1234,
            sequence_length=seq_length,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache=str(cache),
            **blend,
        )

    def same(self, config, sizes, ours, monkeypatch):
        # Megatron asks for its rank when it fills a cache.
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
        theirs = self.builder.BlendedMegatronDatasetBuilder(self.gpt.GPTDataset, sizes, lambda: True, config).build()
        compared = 0
        for mine, other in zip(ours, theirs):
            assert (mine is None) == (other is None)
            if mine is None:
                continue
            assert len(mine) == len(other)
            for i in range(0, len(mine), max(1, len(mine) // 50)):
                sample = other[i]
                assert np.array_equal(mine[i][:-1], sample["tokens"].numpy())
                assert np.array_equal(mine[i][1:], sample["labels"].numpy())
                compared += 1
        return compared

    @pytest.mark.parametrize("blend", ["a", "1 a", "0.3 a 0.7 b", "5 a 1 b 2.5 c"])
    @pytest.mark.parametrize(
        ("split", "train", "seq_length"),
        [("99,1,0", 7, 8), ("50,50", 333, 64), ("969,31,0", 2000, 16), ("100", 1000, 33)],
    )
    def test_data_path_with_split(self, corpora, tmp_path, monkeypatch, blend, split, train, seq_length):
        paths = [corpora.get(word, word) for word in blend.split()]
        valid = math.ceil(train / 10)
        ours = build(paths, split=split, train=train, valid=valid, seq_length=seq_length)
        blend_option = self.utils.get_blend_from_list(paths)
        config = self.config(tmp_path, seq_length, blend=blend_option, split=split)
        assert self.same(config, [train, valid, 0], ours, monkeypatch) >= 7

    def test_paths_of_their_own(self, corpora, tmp_path, monkeypatch):
        train = ["1", corpora["a"], "2", corpora["c"]]
        ours = build(train_paths=train, valid_paths=["1", corpora["b"]], train=500, valid=40)
        blends = [self.utils.get_blend_from_list(p) for p in (train, ["1", corpora["b"]])]
        config = self.config(tmp_path, 16, blend_per_split=[*blends, None])
        assert self.same(config, [500, 40, 0], ours, monkeypatch) > 50

    @pytest.mark.parametrize("blend", ["a", "0.45 a 0.55 b"])
    def test_every_token_of_a_run_is_megatrons(self, corpora, tmp_path, monkeypatch, blend):
        """Of three epochs and more, as the trainer's own loaders give them: training, and each validation in turn."""
        paths = [corpora.get(word, word) for word in blend.split()]
        batch, iterations, interval, each = 4, 240, 50, 12
        options = {
            "data_path": tuple(paths), "split": "80,20", "vocab_size": VOCABULARY, "seq_length": 32,
            "micro_batch_size": 2,
            "global_batch_size": batch, "train_iters": iterations, "eval_interval": interval, "eval_iters": each,
        }  # fmt: skip
        mesh = SimpleNamespace(dp=SimpleNamespace(rank=0, size=1), cp=None)
        loaders = build_loaders(Config().replace(**options), mesh, first=True)
        # Megatron-LM's get_train_valid_test_num_samples
        sizes = [iterations * batch, (iterations // interval + 1) * each * batch, each * batch]
        config = self.config(tmp_path, 32, blend=self.utils.get_blend_from_list(paths), split="80,20,0")
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
        theirs = self.builder.BlendedMegatronDatasetBuilder(self.gpt.GPTDataset, sizes, lambda: True, config).build()
        for loader, dataset, samples in zip(loaders, theirs, sizes):
            for one in getattr(dataset, "datasets", [dataset]):
                assert len(one.document_index) >= 3 * len(one.indices), "three epochs"
            for start in range(0, samples, batch):
                ours = loader.batch(start)
                for tokens, labels, i in zip(
                    ours.tokens.flatten(0, 1), ours.labels.flatten(0, 1), ours.sample_index.flatten()
                ):
                    sample = dataset[int(i)]
                    assert torch.equal(tokens, sample["tokens"]) and torch.equal(labels, sample["labels"])
            loader.close()


def test_a_repeated_dataset_keeps_the_order_and_begins_again():
    class Few:
        sources = ()

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> np.ndarray:
            return np.array([index])

    repeated = Repeated(Few())
    assert [int(repeated[i][0]) for i in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    with pytest.raises(IndexError):
        repeated[-1]
