"""Recipes: the precision of every operand of every GEMM of a linear operator.

A linear operator is three matrix products (GEMMs). With the tokens of a batch as rows, T tokens, I inputs, O outputs:

                   reads                              gives              contracted over
    fprop          input (T, I),   weight (O, I)      output (T, O)      I, the inputs
    dgrad          grad_output (T, O), weight (O, I)  grad_input (T, I)  O, the outputs
    wgrad          grad_output (T, O), input (T, I)   grad_weight (O, I) T, the tokens

A recipe says for each of these nine places how its tensor is cast: a number format and which elements share a scale,
written as a word, `e4m3/tile`; None (the word `bf16`) keeps the tensor as it is. Every operand is cast from the
high-precision tensor that the operator was given: an operand that two GEMMs read is never quantized twice, and the
parameter itself stays in its own 16 bits. A "result" is the product (bias included) before anybody else reads it.

    tensor         one scale for all
    row            one scale a row of the matrices above: a token for input, grad_output and their kind, an output
                   channel for the weight and its gradient
    tile           1 x 128 along the dimension that the GEMM contracts: so the same input has other tiles in wgrad (128
                   tokens of one channel) than in fprop (128 channels of one token)
    block          128 x 128
    mx             32 elements along the contracted dimension, with a power of two as their scale (OCP Microscaling)
    mx_floor       the same under the OCP specification's own rule for the scale, which is smaller
    nv             16 elements along the contracted dimension, with an E4M3 number as their scale, times one float32
                   number of the tensor (NVFP4, 2509.25149)
    nv2d           16 x 16, the same: a weight has the same values in fprop and dgrad
    nv_4over6, nv2d_4over6    the same of E2M1, where each group's largest magnitude becomes 6 or 4, whichever has the
                   smaller error (Four Over Six, 2512.02010)
    nv_row         as nv, with a float32 number for each line along the contracted dimension, not for the tensor: in
                   fprop a token, in wgrad a channel
    delayed        one scale for all, from the largest magnitude of the last `history` steps and not of this tensor (as
                   Transformer Engine's delayed scaling): saturates what has grown since

A scale is max|group| / format.max in float32. That of `mx` is this number rounded up to a power of two (RCEIL), as in
torchao, Transformer Engine and CUTLASS, so that no element saturates; NVIDIA's recipe (2506.08027) found training to
need it. That of `mx_floor` is 2^(floor(log2 max|group|) - floor(log2 format.max)), the rule of the OCP specification,
under which the largest elements of a group may saturate. A group that the tensor's edge cuts is smaller; along the
widths of a linear tiles and blocks may be cut, other groups not (`Recipe.divisors`). Those of `nv` are two, as in
appendix C of 2509.25149, each step in float32: with encode = 448 * format.max / max|tensor|, which brings the largest
group to E4M3's largest number, a group's E4M3 number is max|group| * (encode / format.max), rounded to nearest, and its
scale that number / encode, as Transformer Engine computes both. The largest elements saturate where it was rounded
down.

Those of the variants are Transformer Engine's (`NVFP4BlockScaling`, read at d0067d0d). `nv_row`, its
row_scaled_activation, takes max|tensor| over the line. Under `nv_4over6` encode = 256 * 6 / max|tensor|, which leaves
E4M3 room for half as much again, and a group's E4M3 number is max|group| / 6 * encode or 1.5 times that: then the
largest magnitude becomes 4, below which values are closer to each other than 4 and 6 are. The error is the sum of
|value - element| (MAE, the default there; the authors' own code sums squares by default), and of equal ones 6 stays.

`int8/row/codes` for both operands of fprop: the codes themselves are multiplied, and the integer sums scaled
(`int8.py`). No other GEMM can: a token's or an output channel's scale lies along what they contract.

Two more words may stand behind the scale:

    hadamard       of both operands of a GEMM: before they are cast, each 16 elements along the contracted dimension are
                   multiplied by one orthonormal matrix, Hadamard's under random signs (`casting.rotated`). The product
                   is as before, and an outlier's magnitude is spread over 16. What is missing to 16 tokens is zeros
    stochastic     of operands of dgrad and wgrad: rounded up or down with the probability (to 1/256) that makes the
                   expectation exact, by the model's own generator, whose state is in checkpoints. fprop has none:
                   recomputed by activation checkpointing it has to give the same output. A dry run rounds to nearest

Named recipes (`RECIPES`):

    fp8_hybrid     E4M3 input and weight, E5M2 grad_output, scale per tensor, results kept (Transformer Engine)
    fp8_delayed    the same with delayed scales, history 16
    fp8_delayed_1024    with history 1024, which is common in practice: what has grown saturates, what has shrunk
                   underflows until the largest value of long ago is forgotten
    deepseek_v3    E4M3 everywhere: tiles for input and grad_output, blocks for the weight, results kept (2412.19437)
    deepseek_v3_blocks    blocks for grad_output too, which that report found to diverge (its appendix B.2)
    mxfp8          E4M3 everywhere, mx, results kept
    mxfp4          the same in E2M1
    mxfp8_floor, mxfp4_floor    the same two with mx_floor
    nvfp4          E2M1 everywhere: nv for input and grad_output, nv2d for the weight, results kept; grad_output is
                   rounded stochastically, wgrad's operands are rotated (2509.25149)
    nvfp4_no_sr, nvfp4_no_rht, nvfp4_1d    the same without stochastic rounding, without the rotation, or with the
                   weight in nv: other values in dgrad than in fprop
    nvfp4_4over6   nvfp4_no_rht with input and weight in nv_4over6 and nv2d_4over6: Transformer Engine's
                   nvfp4_4over6="all", which leaves grad_output as it is and has no rotation beside it
    nvfp4_row_scaled    nvfp4_no_rht with the input in nv_row: its row_scaled_activation, which has no rotation either
    sim_<format>   the paper's quantization-simulated operators (E.2), everything per row: forward casts input, weight
                   and output, backward the incoming gradient and the resulting weight and input gradients; the backward
                   GEMMs see the weight and the input that the forward GEMM saw
    llm_int8       INT8 input and weight in fprop, multiplied as integers, all else kept: fine-tuning (5.3, E.3)
    llm_int8_dgrad      the same, and dgrad reads what fprop read as the weight, codes times scale
    bf16           nothing is cast

Recipes of one's own: `Recipe.of("mine", {"fprop": {"input": "e4m3/tile"}})`, or the same under `precision.recipes`.

Where the paper is silent: scales of the simulated formats are float32; the weight's rows are its output
channels in both GEMMs that read it; a bias is added before the output is cast, and its gradient is the sum of
grad_output as it came in, because that is no GEMM; delayed scales look back on optimizer steps, not on micro-batches.

FP32 accumulation, which DeepSeek-V3's recipe asks for, is left to the kernels of the tensors' own dtype: those of 16
bits add up in FP32. Where cuBLAS splits a sum it may join the parts in bfloat16, unless
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False: `gnmr train` sets it, a loop of one's own
has to. Weight gradients and master weights are of the parameters' dtype; that report keeps them in FP32
(`training.dtype=float32`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from gnmr import names as vocabulary
from gnmr.names import GEMMS
from gnmr.precision.formats import FORMATS, Format, KeepFormat, get_format

SCALES = (
    *("delayed", "tensor", "block", "row", "nv2d", "nv2d_4over6"),
    *("tile", "mx", "mx_floor", "nv", "nv_4over6", "nv_row"),
)
"""The coarsest first."""
TILE, MX, NV, HADAMARD = 128, 32, 16, 16
_LENGTHS = {"tile": TILE, "mx": MX, "mx_floor": MX, "nv": NV, "nv_4over6": NV, "nv_row": NV}
"""Of groups along the contracted dimension."""
_SQUARES = {"block": TILE, "nv2d": NV, "nv2d_4over6": NV}
"""Of groups that are as long in both."""


@dataclass(frozen=True)
class Cast:
    """A number format and its scale's granularity. ValueError for an unknown one."""

    format: Format
    scale: str
    history: int = 16
    """Steps that a delayed scale looks back; the other granularities have none."""
    codes: bool = False
    """Whether the GEMM multiplies the codes and scales its sums: fprop's operands in int8/row (`int8.py`)."""
    hadamard: bool = False
    """Whether the operand is rotated before."""
    stochastic: bool = False
    """Whether it is rounded stochastically, where there is a generator to draw from."""
    outliers: float | None = None
    """Of codes: columns with a magnitude from here on stay in 16 bits; None: no column does."""

    def __post_init__(self) -> None:
        if isinstance(self.format, KeepFormat):
            raise ValueError(f"{self.format.name} casts nothing: write None")
        if self.scale not in SCALES:
            raise ValueError(f"scale {self.scale!r} is not known: use one of {', '.join(SCALES)}")
        if self.history < 1:
            raise ValueError(f"history={self.history}: must be 1 or more")
        altered = self.hadamard or self.stochastic
        if self.codes and (altered or (self.format.name, self.scale) != ("int8", "row")):
            raise ValueError(f"{self}: only the codes of int8/row can be multiplied")
        if self.hadamard and self.scale == "delayed":
            raise ValueError(f"{self}: what a delayed scale remembers is not rotated; use another scale")
        if self.four_over_six and (self.stochastic or self.format.name != "e2m1"):
            raise ValueError(f"{self}: four over six chooses between values of e2m1 that are rounded to nearest")

    @staticmethod
    def of(word: str) -> Cast | None:
        """The cast that is written `e4m3/tile`, `e5m2/delayed/1024` with its history, `int8/row/codes` or
        `e2m1/nv/hadamard/stochastic`; None for `bf16`."""
        name, scale, *more = (*word.split("/"), "")[: max(2, word.count("/") + 1)]
        fmt = get_format(name)
        if isinstance(fmt, KeepFormat) and not scale:
            return None
        found: dict[str, Any] = {}
        for each in more:
            key = each if each in ("codes", "hadamard", "stochastic") else "history"
            if key in found or (key == "history" and not (scale == "delayed" and each.isdecimal())):
                raise ValueError(
                    f"{word}: behind the scale stands the history of delayed, a number, or once codes, hadamard or "
                    "stochastic"
                )
            found[key] = int(each) if key == "history" else True
        return Cast(fmt, scale, **found)

    @property
    def directed(self) -> bool:
        """Whether the result depends on the dimension that the GEMM contracts."""
        return self.scale in _LENGTHS or self.hadamard

    @property
    def power_of_two(self) -> bool:
        """Whether groups have powers of two as their scales (E8M0)."""
        return self.scale in ("mx", "mx_floor")

    @property
    def two_levels(self) -> bool:
        """Whether groups have E4M3 scales under one of the tensor, or of a line of it."""
        return self.scale.startswith("nv")

    @property
    def four_over_six(self) -> bool:
        """Whether each group's largest magnitude becomes 4 or 6."""
        return self.scale.endswith("4over6")

    def group(self, contraction_dim: int) -> tuple[int | None, int | None]:
        """(rows, columns) of the elements with one scale; None: all of them."""
        if (side := _SQUARES.get(self.scale)) is not None:
            return side, side
        if (length := _LENGTHS.get(self.scale)) is not None:
            return (length, 1) if contraction_dim == 0 else (1, length)
        return (1, None) if self.scale == "row" else (None, None)

    def __str__(self) -> str:
        history = f"/{self.history}" if self.scale == "delayed" and self.history != 16 else ""
        more = "".join(f"/{key}" for key in ("codes", "hadamard", "stochastic") if getattr(self, key))
        return f"{self.format.name}/{self.scale}{history}{more}"


@dataclass(frozen=True)
class Gemm:
    """The casts of one GEMM's two operands and of its result; None: kept as it is."""

    input: Cast | None = None
    weight: Cast | None = None
    grad_output: Cast | None = None
    result: Cast | None = None

    @staticmethod
    def of(**words: str) -> Gemm:
        """Of the words of its casts: Gemm.of(input="e4m3/tile", weight="e4m3/block")."""
        return Gemm(**{operand: Cast.of(word) for operand, word in words.items()})

    @property
    def casts(self) -> list[Cast]:
        """Those of its operands and its result, without the operands that are kept."""
        return [cast for field in fields(self) if (cast := getattr(self, field.name)) is not None]


READS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""The operands of each GEMM."""


@dataclass(frozen=True)
class Recipe:
    """The casts of a linear operator. ValueError for a GEMM with an operand that it does not read."""

    name: str
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    backend: str = "simulated"
    """What runs the GEMMs: simulated, scaled_mm or int_mm (`gnmr.precision.resolve`)."""

    @staticmethod
    def of(name: str, gemms: Mapping[str, Mapping[str, str]]) -> Recipe:
        """A recipe of one's own, of the words of its casts: Recipe.of("mine", {"fprop": {"input": "e4m3/tile"}}).

        What is not said is kept as it is. ValueError, one line, for a word, operand or GEMM that does not exist, and
        for a name that stands for something else already.
        """
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"recipe {name!r}: a name is letters, digits, - and _, and begins with no digit")
        if name in RECIPES or name in FORMATS:
            raise ValueError(
                f"recipe {name}: is a {'format' if name in FORMATS else 'recipe'} already; name it otherwise"
            )
        made: dict[str, Any] = {}
        for gemm, words in _mapping(name, gemms, "{gemm: {operand: cast}}, as {fprop: {input: e4m3/tile}}").items():
            if gemm not in GEMMS:
                raise ValueError(f"recipe {name}: {gemm!r} is no GEMM: use {', '.join(GEMMS)}")
            for operand, word in _mapping(f"{name}: {gemm}", words, "{operand: cast}, as {input: e4m3/tile}").items():
                if operand not in (known := (*READS[gemm], "result")):
                    raise ValueError(f"recipe {name}: {gemm} has no {operand!r}: use {', '.join(known)}")
                if not isinstance(word, str):
                    raise ValueError(
                        f"recipe {name}: {gemm}.{operand}={word}: must be a word such as e4m3/tile, or bf16"
                    )
            try:
                made[gemm] = Gemm.of(**words)
            except ValueError as error:
                raise ValueError(f"recipe {name}: {gemm}: {error}") from error
        return Recipe(name, **made)

    def __post_init__(self) -> None:
        for name, operands in READS.items():
            gemm: Gemm = getattr(self, name)
            if foreign := [o for o in ("input", "weight", "grad_output") if o not in operands and getattr(gemm, o)]:
                raise ValueError(f"recipe {self.name}: {name} reads {' and '.join(operands)}, not {foreign[0]}")
            if gemm.result is not None and gemm.result.scale not in ("tensor", "row"):
                raise ValueError(f"recipe {self.name}: {name}'s result cannot be {gemm.result}; use tensor or row")
            rotated = [cast is not None and cast.hadamard for cast in (getattr(gemm, o) for o in operands)]
            if len(set(rotated)) > 1 or (gemm.result is not None and gemm.result.hadamard):
                raise ValueError(f"recipe {self.name}: {name}: hadamard is for both of {' and '.join(operands)}")
            if any(cast.stochastic and (name == "fprop" or cast is gemm.result) for cast in gemm.casts):
                raise ValueError(f"recipe {self.name}: {name}: stochastic is for operands of dgrad and wgrad")
            codes = [cast.codes for cast in gemm.casts]
            if any(codes) and (name != "fprop" or codes != [True, True] or gemm.result is not None):
                raise ValueError(f"recipe {self.name}: codes are for both operands of fprop, whose result is kept")

    def words(self) -> dict[str, dict[str, str]]:
        """{gemm: {operand: cast}}, what `of` takes; casts that keep the tensor are left out."""
        return {
            gemm: {key: str(cast) for key, cast in vars(getattr(self, gemm)).items() if cast is not None}
            for gemm in GEMMS
        }

    @property
    def casts(self) -> list[Cast]:
        """Of all three GEMMs, in their order."""
        return [cast for name in GEMMS for cast in getattr(self, name).casts]

    @property
    def integer(self) -> bool:
        """Whether fprop multiplies integers."""
        return self.fprop.input is not None and self.fprop.input.codes

    @property
    def stochastic(self) -> bool:
        """Whether any of its casts draws random numbers."""
        return any(cast.stochastic for cast in self.casts)

    @property
    def history(self) -> int:
        """Steps that its delayed scales look back; 0 without any."""
        return max((cast.history for cast in self.casts if cast.scale == "delayed"), default=0)

    def with_recovered(self, recovery: Recipe, gemms: Sequence[str]) -> Recipe:
        """This recipe with the named GEMMs taken from `recovery`; with all of them that is `recovery` itself.

        ValueError for a name that is no GEMM, or none at all.
        """
        if not gemms or (unknown := [name for name in gemms if name not in GEMMS]):
            raise ValueError(f"recovers={list(gemms) and unknown}: use some of {', '.join(GEMMS)}")
        return self.with_gemms(dict.fromkeys(gemms, recovery))

    def with_gemms(self, recipes: Mapping[str, Recipe]) -> Recipe:
        """Return this recipe with GEMMs taken from others, {gemm: recipe}; with all of them from one that one itself.

        >>> RECIPES["nvfp4"].with_gemms({"fprop": RECIPES["mxfp8"], "dgrad": RECIPES["bf16"]}).name
        'mxfp8 in fprop and bf16 in dgrad'
        """
        taken = {gemm: recipes[gemm] for gemm in GEMMS if gemm in recipes}
        of: dict[str, list[str]] = {}
        for gemm, recipe in taken.items():
            of.setdefault(recipe.name, []).append(gemm)
        if not taken or (len(taken) == len(GEMMS) and len(of) == 1):
            return taken.get("fprop", self)
        name = " and ".join(f"{recipe} in {', '.join(gemms)}" for recipe, gemms in of.items())
        return replace(self, name=name, **{gemm: getattr(recipe, gemm) for gemm, recipe in taken.items()})

    def divisors(self) -> tuple[int, int]:
        """What the numbers of inputs and of outputs of a linear must be multiples of: no group of MX or NVFP4, and none
        that is rotated, may be cut. Tiles and blocks may."""
        # The two dimensions of each operand: is it tokens (None), inputs (0) or outputs (1)?
        dims = {"input": (None, 0), "weight": (1, 0), "grad_output": (None, 1)}
        contracted = {"fprop": 0, "dgrad": 1, "wgrad": None}
        needed = [1, 1]
        for gemm, operands in READS.items():
            for operand in operands:
                cast: Cast | None = getattr(getattr(self, gemm), operand)
                if cast is None:
                    continue
                along = dims[operand].index(contracted[gemm])
                lengths = [1, 1] if cast.scale in ("tile", "block") else list(cast.group(along))
                if cast.hadamard:
                    lengths[along] = max(lengths[along] or 1, HADAMARD)
                for dim, length in zip(dims[operand], lengths, strict=True):
                    if dim is not None and length is not None:
                        needed[dim] = max(needed[dim], length)  # 1, 16 or 32: multiples of each other
        return needed[0], needed[1]


def _mapping(what: str, given: Mapping[str, Any], form: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"recipe {what}={given}: must be {form}")
    return given


def _recipe(name: str, words: vocabulary.Words) -> Recipe:
    fprop, dgrad, wgrad = (Gemm.of(**words.get(gemm, {})) for gemm in GEMMS)
    return Recipe(name, fprop, dgrad, wgrad)


RECIPES = {name: _recipe(name, words) for name, words in vocabulary.RECIPES.items()}

ExecutionPath: TypeAlias = Format | Recipe
"""What an operator does with its operands: of a format, one with a compressed saved input; of a recipe, casts."""


def described(path: ExecutionPath) -> str:
    """Return its name, and of a recipe that casts something what runs it and what it leaves in 16 bits."""
    if not isinstance(path, Recipe) or not path.casts:
        return path.name
    outliers = None if path.fprop.input is None else path.fprop.input.outliers
    return f"{path.name}, {path.backend}{'' if outliers is None else f', columns from {outliers:g} in 16 bits'}"
