"""Local task files, and a tiny random LLaMA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_tasks import SHARED, handmade, real


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (real if (SHARED / "mmlu").is_dir() else handmade)(folder)
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
def checkpoint(task_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of two layers in Hugging Face's layout, its tokenizer trained on the tasks' own text."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted(task_data.rglob("*.*"))], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    shape = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
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
