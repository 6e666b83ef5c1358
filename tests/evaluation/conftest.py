"""Few items of the four tasks as local definitions for lm-eval, and a tiny random LLaMA."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml


def rows_of_tasks() -> dict[str, tuple[str, dict[str, list[dict[str, Any]]]]]:
    """lm-eval's file: (below its tasks, {split: rows in the hub's schema})."""

    def sums(first: int, last: int) -> list[dict[str, Any]]:
        ask, answer = "Ann has {0} pears and buys {1}. How many?", "{0} + {1}.\n#### {2}"
        return [
            {"question": ask.format(i, i + 2), "answer": answer.format(i, i + 2, 2 * i + 2)} for i in range(first, last)
        ]

    choices = ["one", "two", "three", "four"]
    own = [{"subject": "anatomy", "question": f"Which is {i}? ", "choices": choices, "answer": i % 4} for i in range(5)]
    endings = ["lifts it.", "sits down slowly.", "eats the barbell, all of it.", "goes."]
    told = {"activity_label": "Lifting", "ctx_a": "A lady walks to a barbell.", "ctx_b": "the lady", "endings": endings}
    page = " \n = Town = \n \n The town is a town . \n = = History = = \n" * 6
    return {
        "gsm8k": ("gsm8k/gsm8k.yaml", {"train": sums(10, 22), "test": sums(1, 4)}),
        "mmlu_anatomy": ("mmlu/default/mmlu_anatomy.yaml", {"dev": own, "test": own[:3]}),
        "hellaswag": ("hellaswag/hellaswag.yaml", {"validation": [told | {"label": str(i % 4)} for i in range(6)]}),
        "wikitext": ("wikitext/wikitext.yaml", {"test": [{"page": page + str(i)} for i in range(3)]}),
    }


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for scores.data."""
    tasks = pytest.importorskip("lm_eval.tasks")
    folder, theirs = tmp_path_factory.mktemp("tasks"), Path(tasks.__file__).parent
    for name, (file, splits) in rows_of_tasks().items():
        for split, rows in splits.items():
            (folder / f"{name}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {split: str(folder / f"{name}-{split}.jsonl") for split in splits}
        own = {"include": str(theirs / file), "dataset_path": "json", "dataset_name": None}
        own |= {f"{kind}_split": None for kind in ("training", "validation", "test")}
        own |= {f"{'training' if split == 'train' else split}_split": split for split in splits if split != "dev"}
        own |= {"dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
    group = {
        "group": "mmlu",
        "task": ["mmlu_anatomy"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (folder / "mmlu.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture(autouse=True, scope="session")
def home_of_datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing touches the user's caches, and the hub is out of reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of two layers in Hugging Face's layout, with a byte-level tokenizer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    shape = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,  # logits far from uniform
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(shape)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    theirs.save_pretrained(folder)
    return folder
