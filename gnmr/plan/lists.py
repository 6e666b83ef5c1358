"""Match lists of names that select the linears in low precision, by the rules of the library that reads each list.

`LISTS` has one row per list, below the source in which its rule was read in August 2026. The rules were also read in
the wheels of torchao 0.18, torchtitan 0.3, transformers 5.23, compressed-tensors 0.20 and nvidia-modelopt 0.47. Other
criteria of a library are ignored: widths that do not fit its blocks, and module classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from functools import cache
from itertools import combinations
from typing import Any

from gnmr.options import one_of
from gnmr.patterns import listed, select

RULES = {
    "part": "any part of a name",
    "weight": "any part of a name that ends in .weight",
    "search": "a regular expression, anywhere in a name",
    "start": "a regular expression from the start up to a dot, or any end of a name",
    "exact": "a whole name",
    "re:": "a whole name, or re: and a regular expression from its start",
    "words": "whole words between dots, or re: and a regular expression from the start",
    "any": "a whole name, any part of one, or * and ? over one",
    "glob": "* and ? over a whole name",
    "end": "* and ?, at any end between dots",
    "quantizer": "GLOB:on or GLOB:off over names such as layers.0.mlp.weight_quantizer; the last that fits decides",
    "first": "how many of the first blocks",
    "last": "how many of the last blocks",
}
"""The meaning of an entry, by rule."""


@dataclass(frozen=True)
class Reading:
    """How a library reads one of its lists."""

    library: str
    rule: str
    layout: str = ""
    """The layout of module names that entries are matched against, if it is not the checkpoint's; see `LAYOUTS`."""
    converts: bool = False
    """True if the list names linears to convert; False if it names linears to leave out."""
    always: tuple[str, ...] = ()
    """Parts of weight names that the library always leaves out."""
    of_checkpoint: bool = False
    """True if the library loads the checkpoint, False if it goes through the modules of a model in memory."""
    of_both: bool = False
    """True if the list has readers of either kind."""


_MILES = ("router", "mlp.gate.", "lm_head", "eh_proj", "weights_proj", "head.", "wo_a", "ffn.gate.", "compressor.")
_MEGATRON: dict[str, Any] = {"layout": "megatron", "always": ("output_layer", "router")}
_ENGINE: dict[str, Any] = {"layout": "engine", "of_checkpoint": True}
_HEAD = ("lm_head",)

# Above each list: the repository and the files in which its rule was read.
LISTS: dict[str, Reading] = {
    # NVIDIA-NeMo/Automodel nemo_automodel/components/quantization/fp8.py
    "filter_fqns": Reading("torchao, Automodel", "part"),
    # pytorch/torchtitan torchtitan/components/quantization/utils.py, mx.py, nvfp4.py
    "torchtitan.filter_fqns": Reading("torchtitan (float8)", "part", "torchtitan"),
    "fqns": Reading("torchtitan (MX, NVFP4)", "part", "torchtitan", converts=True),
    # huggingface/transformers src/transformers/quantizers/quantizers_utils.py
    "modules_to_not_convert": Reading("transformers", "start", of_both=True),
    # vllm-project/vllm vllm/model_executor/layers/quantization/compressed_tensors/utils.py
    # vllm-project/compressed-tensors src/compressed_tensors/utils/match.py
    "ignore": Reading("compressed-tensors, vLLM", "re:", **_ENGINE, of_both=True),
    # vllm-project/vllm vllm/model_executor/layers/quantization/fp8.py, utils/quant_utils.py
    "ignored_layers": Reading("vLLM (fp8), verl", "exact", **_ENGINE, always=_HEAD),
    # verl-project/verl verl/utils/sglang/sglang_fp8_utils.py, verl/utils/fp8_utils.py
    "sglang.ignored_layers": Reading(
        "verl (SGLang)", "words", always=("lm_head", "mlp.gate.weight"), of_checkpoint=True
    ),
    # vllm-project/vllm vllm/model_executor/layers/quantization/modelopt.py
    "exclude_modules": Reading("vLLM (ModelOpt)", "any", **_ENGINE),
    # NVIDIA/Model-Optimizer modelopt/torch/quantization/conversion.py, algorithms.py
    "quant_cfg": Reading("ModelOpt", "quantizer"),
    "disabled_layers": Reading("ModelOpt AutoQuantize", "glob"),
    # NVIDIA-NeMo/RL nemo_rl/models/generation/vllm/quantization/fp8.py
    "quantization_ignored_layer_kws": Reading("NeMo-RL", "part", **_ENGINE, always=_HEAD),
    "num_first_layers_in_bf16": Reading("NeMo-RL", "first", always=_HEAD, of_checkpoint=True),
    "num_last_layers_in_bf16": Reading("NeMo-RL", "last", always=_HEAD, of_checkpoint=True),
    # PrimeIntellect-ai/prime-rl src/prime_rl/trainer/models/layers/fp8_linear.py
    "ignore_patterns": Reading("prime-rl", "search", of_both=True),
    # radixark/miles tools/convert_hf_to_mxfp8.py
    "extra_high_precision_layers_hf": Reading("miles", "weight", always=_MILES, of_checkpoint=True),
    # radixark/miles miles/backends/megatron_utils/megatron_to_hf/processors/quantizer_mxfp8.py
    "extra_high_precision_layers_megatron": Reading("miles", "weight", **_MEGATRON),
    # NVIDIA/Megatron-LM megatron/core/fp8_utils.py
    "num_layers_at_start_in_bf16": Reading("Megatron-LM, miles", "first", **_MEGATRON),
    "num_layers_at_end_in_bf16": Reading("Megatron-LM, miles", "last", **_MEGATRON),
    # gnmr/names.py
    "targets": Reading("gnmr", "end", converts=True),
    "exclude": Reading("gnmr", "end"),
    "pins": Reading("gnmr", "end"),
}
"""Every known list, by its key in the library; if two libraries share a key, their names precede it."""

_BUILT = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "kv_proj": ("key_proj", "value_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Linears that vLLM and SGLang build from several linears of the checkpoint."""
LAYOUTS = {
    "": (),
    "engine": (
        (r"\.experts\.\d+\..*", ".experts"),
        *((rf"(?<=\.)(?:{'|'.join(names)})$", built) for built, names in _BUILT.items()),
    ),
    "torchtitan": (
        (r"^model\.", ""),
        (r"self_attn\.[qkv]_proj$", "attention.qkv_linear.wqkv"),
        (r"self_attn\.o_proj$", "attention.wo"),
        (r"mlp\.gate_proj$", "feed_forward.w1"),
        (r"mlp\.down_proj$", "feed_forward.w2"),
        (r"mlp\.up_proj$", "feed_forward.w3"),
        (r"mlp\.gate$", "moe.router.gate"),
    ),
    "megatron": (
        (r"^model\.layers", "decoder.layers"),
        (r"self_attn\.[qkv]_proj$", "self_attention.linear_qkv"),
        (r"self_attn\.o_proj$", "self_attention.linear_proj"),
        (r"\.experts\.\d+\.", ".experts."),
        (r"(?:gate|up|gate_up)_proj$", "linear_fc1"),
        (r"down_proj$", "linear_fc2"),
        (r"mlp\.gate$", "mlp.router"),
        (r"^lm_head$", "output_layer"),
    ),
}
"""Substitutions, in this order, that make module names from the checkpoint's names."""
HEADS = ("lm_head", "output", "output_layer", "head", "embed_out")
"""Names of the output head; a list often has several."""
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True)
class Entry:
    """One entry of a list, and the names that it matches."""

    which: str
    """Name of the list, one of `LISTS`."""
    text: str
    meant: tuple[str, ...]
    """Names that it matches as whole words between dots."""
    swept: tuple[str, ...]
    """Names that it matches within a word: layers.10 by layers.1."""

    @property
    def converts(self) -> bool:
        """Return True if the matched linears are converted, False if they are left out."""
        return LISTS[self.which].converts or (LISTS[self.which].rule == "quantizer" and self.text.endswith(":on"))

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that it matches."""
        return self.meant + self.swept

    @property
    def trap(self) -> bool:
        """Return True if it matches more than it seems to: parts of names besides whole words, or within a number."""
        return bool(self.swept) and (bool(self.meant) or any(_cuts_number(self.text, name) for name in self.swept))


# ---- reading ----


def read_lists(lists: Mapping[str, Sequence[object] | str | int] | None, side: str = "") -> dict[str, list[str]]:
    """Return the lists, each as texts.

    Args:
        lists: entries by list.
        side: what precedes the keys of the lists in messages.

    Raises:
        ValueError: a list is unknown, or an entry is invalid.
    """
    texts: dict[str, list[str]] = {}
    for which, entries in (lists or {}).items():
        if which not in LISTS:
            one_of(tuple(LISTS), **{side or "lists": which})
        rule, key = LISTS[which].rule, f"{side}.{which}" if side else which
        if not isinstance(entries, Sequence):
            # A number of blocks.
            entries = [str(entries)]
        elif rule == "quantizer" and not isinstance(entries, str):  # ModelOpt's own list has mappings
            entries = [_of_config(key, entry) for entry in entries]
        texts[which] = listed(key, entries)
        if "" in texts[which]:
            raise ValueError(f"{key}={texts[which]}: has an empty entry, which is part of every name")
        for text in texts[which]:
            if rule == "quantizer" and text.rpartition(":")[2] not in ("on", "off"):
                raise ValueError(f"{key}={text}: must end in :on or :off")
            if rule in ("first", "last") and not (text.isdecimal() and len(texts[which]) == 1):
                raise ValueError(f"{key}={text}: must be one whole number")
            try:
                re.compile(_pattern(text, rule) or "")
            except re.error as error:
                raise ValueError(f"{key}={text}: is not a regular expression ({error})") from error
    return texts


def _of_config(key: str, entry: object) -> object:
    """Return an entry of ModelOpt's own list, {quantizer_name: GLOB, enable: BOOL}, as a text."""
    if not isinstance(entry, Mapping):
        return entry
    if "quantizer_name" not in entry or "parent_class" in entry:
        raise ValueError(f"{key}={dict(entry)}: must have a quantizer_name, and no parent_class")
    return f"{entry['quantizer_name']}:{'on' if entry.get('enable', True) else 'off'}"


def _pattern(text: str, rule: str) -> str | None:
    """Return the regular expression in a text under this rule, or None."""
    if rule in ("search", "start"):
        return text
    return text[3:] if rule in ("re:", "words") and text.startswith("re:") else None


@cache
def called(name: str, layout: str) -> str:
    """Return the name of a checkpoint's linear in another layout; names that are not Hugging Face's are unchanged.

    >>> called("model.layers.0.mlp.up_proj", "engine"), called("model.layers.0.mlp.up_proj", "megatron")
    ('model.layers.0.mlp.gate_up_proj', 'decoder.layers.0.mlp.linear_fc1')

    Args:
        name: dotted name of the linear.
        layout: one of `LAYOUTS`; engine changes the last words of any name.
    """
    renamed = layout == "engine" or name.startswith("model.") or name == "lm_head"
    for pattern, replacement in LAYOUTS[layout] if renamed else ():
        name = re.sub(pattern, replacement, name)
    return name


def reads_memory(which: str) -> bool:
    """Return True if the library goes through the modules of a model in memory, False if it loads the checkpoint.

    Args:
        which: the library's list, one of `LISTS`.
    """
    return not LISTS[which].of_checkpoint


def never_quantized(which: str, name: str) -> bool:
    """Return True if the library of a list never quantizes a linear, whatever the list says.

    Args:
        which: the list, one of `LISTS`.
        name: the linear's name in the checkpoint.
    """
    built = called(name, LISTS[which].layout)
    return any(matches(always, built, "weight") for always in LISTS[which].always)


# ---- matching ----


def entries_of(which: str, texts: Iterable[str], names: Sequence[str]) -> list[Entry]:
    """Return the matches of each entry of a list.

    Args:
        which: the list, one of `LISTS`.
        texts: all entries of the list; of `quant_cfg` the last that fits decides.
        names: the linears, by the checkpoint's names or the model's own.

    Returns:
        The entries in their order, with the names that each matches.
    """
    reading, entries, texts = LISTS[which], [], list(texts)
    blocks = {name: int(number[1]) for name in names if (number := re.search(r"\b(?:layers?|h)\.(\d+)\.", name))}
    num_blocks = 1 + max(blocks.values(), default=-1)
    for text in texts:
        if reading.rule in ("first", "last"):
            # Blocks are counted over the whole model, whatever else the list has.
            in_range = range(int(text)) if reading.rule == "first" else range(num_blocks - int(text), num_blocks)
            matched = meant = [name for name, block in blocks.items() if block in in_range]
        elif reading.rule == "quantizer":
            matched = meant = [name for name in names if _deciding(texts, name) == text]
        else:
            matched = [name for name in names if _matches_linear(reading, text, name)]
            meant = [name for name in matched if _at_dots(text, called(name, reading.layout), reading.rule)]
        entries.append(Entry(which, text, tuple(meant), tuple(name for name in matched if name not in meant)))
    return entries


def in_memory(entry: Entry, names: Mapping[str, str]) -> Entry:
    """Return an entry whose linears have their names in memory.

    Args:
        entry: an entry that matched names of the checkpoint.
        names: {the checkpoint's name: name in memory}; several linears may be one in memory, which counts once.
    """
    meant = tuple(dict.fromkeys(names[name] for name in entry.meant))
    swept = tuple(dict.fromkeys(names[name] for name in entry.swept if names[name] not in meant))
    return replace(entry, meant=meant, swept=swept)


def _matches_linear(reading: Reading, text: str, name: str) -> bool:
    """Return True if an entry of this list matches the linear; an engine that fuses linears knows both names."""
    built = called(name, reading.layout)
    if reading.layout != "engine":
        return matches(text, built, reading.rule)
    # vLLM looks up the fused linear and each of its parts, and asks for the experts of a layer at once.
    if reading.rule in ("exact", "any") and built.endswith(".experts") and built in text:
        return True  # one projection of one expert leaves out all of them
    if reading.rule == "any":
        return text == name or matches(text, built, reading.rule)
    return matches(text, name, reading.rule) or (reading.rule != "part" and text == built)


def matches(text: str, name: str, rule: str) -> bool:
    """Return True if an entry matches a name by the rule of its library.

    >>> matches("layers.1", "layers.10.mlp.up_proj", "part"), matches("layers.1", "layers.10.mlp.up_proj", "start")
    (True, False)

    Args:
        text: the entry.
        name: dotted name of a linear, in the library's layout.
        rule: how the library compares the two, see `Reading`.
    """
    pattern = _pattern(text, rule)
    if rule == "end":
        return bool(select([name], [text])[0])
    if rule == "quantizer":
        return _fits_quantizer(text, name, "weight") or _fits_quantizer(text, name, "input")
    if rule == "start":  # transformers: re.match up to a dot, or str.endswith
        return bool(re.match(rf"(?:{text}){_BOUNDARY}", name)) or name.endswith(text)
    if rule == "search":
        return bool(re.search(text, name))
    # A regular expression that has to match from the beginning of the name.
    if pattern is not None:
        return bool(re.match(pattern, name)) or (rule == "words" and bool(re.match(pattern, f"{name}.weight")))
    if rule == "words":  # without case, and over the weight's name
        return f".{text.strip('.').lower()}." in f".{name.lower()}.weight."
    if rule in ("exact", "re:"):
        return text == name
    if rule == "glob":
        return fnmatchcase(name, text)
    # The other libraries look for the text anywhere in the name.
    return text in (f"{name}.weight" if rule == "weight" else name) or (rule == "any" and fnmatchcase(name, text))


def fits_none(entry: Entry, names: Iterable[str]) -> bool:
    """Return True if an entry fits no linear.

    Args:
        entry: the entry with its matches. No blocks (0 of the first or last) fit any model.
        names: all linears. An entry of `quant_cfg` fits one of them also where a later entry overrides it.
    """
    rule = LISTS[entry.which].rule
    if rule in ("first", "last") and not int(entry.text):
        return False
    overridden = rule == "quantizer" and any(matches(entry.text, name, rule) for name in names)
    return not (entry.names or overridden)


def _deciding(texts: Sequence[str], name: str) -> str | None:
    """Return the entry of `quant_cfg` that decides on a linear, or None if none fits and ModelOpt's quantizers are on.

    The last entry that fits decides on each quantizer; the first of these that turns one on decides on the linear.
    """
    last = []
    for operand in ("weight", "input"):
        fitting = [text for text in texts if _fits_quantizer(text, name, operand)]
        last.append(fitting[-1] if fitting else None)
    turned_on = [text for text in last if text is not None and text.endswith(":on")]
    if turned_on:
        return turned_on[0]
    return None if None in last else last[0]


def _fits_quantizer(text: str, name: str, operand: str) -> bool:
    return fnmatchcase(f"{name}.{operand}_quantizer", text.rpartition(":")[0])


def _at_dots(text: str, name: str, rule: str) -> bool:
    """Return True if the match of a text in a name begins and ends at dots."""
    if rule in ("part", "weight", "any"):
        return _between_dots(text, f"{name}.weight") or (rule == "any" and fnmatchcase(name, text))
    if rule == "search":
        ends = ((match.start(), match.end()) for match in re.finditer(text, name))
        return any(_beside_dot(name, start) and _beside_dot(name, end) for start, end in ends)
    if rule == "start":
        return bool(re.match(rf"(?:{text}){_BOUNDARY}", name)) or name == text or name.endswith(f".{text}")
    # `layers.1*` of gnmr's patterns means 10 and 11 too; as whole words it means `layers.1.*`.
    if rule == "end" and re.search(r"\d\*", text):
        guarded = re.sub(r"(?<=\d)\.\*", r"(?!\\d).*", translate(text))
        return any(re.match(guarded, name[i:]) for i in range(len(name)) if i == 0 or name[i - 1] == ".")
    return True


def _beside_dot(name: str, place: int) -> bool:
    """Return True if a dot or an end of the name is next to this position."""
    return place in (0, len(name)) or "." in name[place - 1 : place + 1]


def _between_dots(text: str, name: str) -> bool:
    """Return True if the text occurs in the name with a dot or nothing on both sides.

    >>> _between_dots("layers.1", "layers.1.mlp"), _between_dots("layers.1", "layers.10.mlp")
    (True, False)
    """
    # A text with a dot at its end brings its own boundary.
    before = r"(?:^|(?<=\.))" if not text.startswith(".") else ""
    after = r"(?=\.|$)" if not text.endswith(".") else ""
    return bool(re.search(before + re.escape(text) + after, name))


def _cuts_number(text: str, name: str) -> bool:
    """Return True if the text ends before another digit of a number in the name, or begins within a number."""
    bare = text.rstrip("*")
    after = bare[-1:].isdigit() and bool(re.search(re.escape(bare) + r"\d", name))
    return after or (bare[:1].isdigit() and bool(re.search(r"\d" + re.escape(bare), name)))


# ---- advice ----


def suggested(text: str, names: Sequence[str], which: str = "filter_fqns") -> str:
    """Suggest an entry of a list that matches the linears that `text` probably meant.

    >>> names = ["model.layers.3.mlp.up_proj", "model.layers.4.mlp.up_proj", "lm_head"]
    >>> [suggested("layers.3", names, which) for which in ("filter_fqns", "ignore", "ignored_layers")]
    ["'layers.3'", "'re:.*layers.3'", "their names, such as 'model.layers.3.mlp.up_proj'"]

    Returns:
        What would be right, for a message: the entry in quotes, or names such as one of the model's. Every entry in it
        matches by the rule of the list's library.
    """
    reading = LISTS[which]
    if reading.rule in ("first", "last"):
        return "a number of blocks, in a model whose linears lie in numbered blocks"
    spellings = {name: [called(name, reading.layout)] for name in names}
    if reading.layout == "engine":
        spellings = {name: [name, *built] for name, built in spellings.items()}
    end = f":{text.rpartition(':')[2]}" if reading.rule == "quantizer" else ""
    # First the words that the entry has, in a spelling of this list that matches exactly their linears.
    word, meant = _nearest_words(text.removesuffix(end).removeprefix("re:"), spellings)
    for entry in _as_entries(word, end) if word else ():
        if {*_names_matched(which, entry, names)} == {*meant}:
            return repr(entry)
    # Else a whole name: of a linear that was meant, or of any.
    example = (meant or names)[0]
    for name in (example, called(example, reading.layout)):
        for entry in _as_entries(name, end):
            if _names_matched(which, entry, names):
                return f"their names, such as {entry!r}" if meant else f"names such as {entry}"
    return "names of linears"


def repaired(entry: Entry, names: Sequence[str]) -> str | None:
    """Return a text that matches only the whole words of an entry; None if no such text is known.

    Args:
        entry: an entry that also matches parts of words, such as layers.1 in layers.10.
        names: all linears.
    """
    for text in (f"{entry.text}.", f".{entry.text}", f".{entry.text}.", f"{entry.text.rstrip('*')}.*"):
        if _names_matched(entry.which, text, names) == entry.meant:
            return text
    return None


def _nearest_words(text: str, spellings: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Return the words between dots that `text` probably meant, and the linears in whose spellings they occur."""
    # The name without what a regular expression or a glob adds.
    bare = re.sub(r"\\(.)|\[\.\]", lambda escaped: escaped[1] or ".", text).strip("*.^$")
    bare = bare.removesuffix(".weight").removesuffix("_quantizer").strip("*.")
    # All runs of words between dots in the model's names, of which a typing error has a near one.
    every = [spelling for name in spellings for spelling in spellings[name]]
    words: dict[str, None] = {}
    for spelling in every:
        split = spelling.split(".")
        words |= dict.fromkeys(".".join(split[i:j]) for i, j in combinations(range(len(split) + 1), 2))
    # The same words in another case; else a head, under whatever name; else another layout; else a typing error.
    near = [word for word in words if word.casefold() == bare.casefold()]
    if not near and bare.rpartition(".")[2] in HEADS:
        near = [spelling for spelling in every if spelling.rpartition(".")[2] in HEADS]
    if not near:  # a name of another library's layout
        linears = [name for name in spellings if any(_between_dots(bare, called(name, layout)) for layout in LAYOUTS)]
        ends = {spellings[name][0].rpartition(".")[2] for name in linears}
        if len(linears) == 1:
            near = [spellings[linears[0]][0]]
        elif len(ends) == 1:
            near = [*ends]
    near = near or get_close_matches(bare, words, 1, cutoff=0.7)
    if not near:
        return "", []
    return near[0], [name for name in spellings if any(_between_dots(near[0], other) for other in spellings[name])]


def _as_entries(word: str, end: str) -> Iterator[str]:
    """Yield words as the libraries' lists may spell them: a part of a name, a regular expression, or a glob."""
    plain = "{}", "{}.", ".{}", ".{}."
    after_re = "re:.*{}", "re:.*{}.*", "re:.*{}[.].*", "re:.*{}$", "re:(?:.*[.])?{}(?:[.].*)?$"
    patterns = ".*{}", ".*{}[.]", "{}.*", "*{}", "*.{}", "*{}*", "*{}.*", "*.{}.*"
    yield from (f"{spelling.format(word)}{end}" for spelling in (*plain, *after_re, *patterns))


def _names_matched(which: str, text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that an entry matches; none if it is invalid in this list."""
    try:
        return entries_of(which, read_lists({which: [text]})[which], names)[0].names
    except ValueError:
        return ()
