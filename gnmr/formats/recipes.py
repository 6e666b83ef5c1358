"""Recipes: the precision of every operand of every GEMM of a linear operator.

A linear operator is three matrix products (GEMMs). With the tokens of a batch as rows, T tokens, I inputs, O outputs:

                   reads                              gives              contracted over
    fprop          input (T, I),   weight (O, I)      output (T, O)      I, the inputs
    dgrad          grad_output (T, O), weight (O, I)  grad_input (T, I)  O, the outputs
    wgrad          grad_output (T, O), input (T, I)   grad_weight (O, I) T, the tokens

A recipe defines the cast of each of these nine tensors: a number format, and which elements share a scale. A cast is
written as a word such as `e4m3/tile`; None (the word `bf16`) keeps the tensor unchanged. Every operand is cast from the
high-precision tensor that the operator was given. An operand that two GEMMs read is therefore never quantized twice,
and the parameter itself stays in its own 16 bits. A "result" is the product, bias included, before it is read.

    tensor         one scale for all
    row            one scale per row of the matrices above: per token for input, output and their gradients, per output
                   channel for the weight and its gradient
    tile           1 x 128 along the dimension that the GEMM contracts: the same input has different tiles in wgrad
                   (128 tokens of one channel) and in fprop (128 channels of one token)
    block          128 x 128
    mx             32 elements along the contracted dimension, with a power of two as their scale (OCP Microscaling)
    mx_floor       the same under the OCP specification's own rule for the scale, which is smaller
    nv             16 elements along the contracted dimension, with an E4M3 number as their scale, times one float32
                   number of the tensor (NVFP4, 2509.25149)
    nv2d           16 x 16, with the same two scales: a weight has the same values in fprop and dgrad
    nv_4over6, nv2d_4over6    the same for E2M1, where each group's largest magnitude becomes 6 or 4, whichever has the
                   smaller error (Four Over Six, 2512.02010)
    nv_row         as nv, with a float32 number for each line along the contracted dimension instead of the tensor: per
                   token in fprop, per channel in wgrad
    none           no scale: numbers are rounded to bfloat16 (`bf16/none`), which has the range of float32
    delayed        one scale for all, from the largest magnitude of the last `history` steps and not of this tensor
                   (Transformer Engine's delayed scaling): elements that have grown since saturate

A scale is max|group| / format.max in float32. The scale of `mx` is this number rounded up to a power of two (RCEIL), as
in torchao, Transformer Engine and CUTLASS, so that no element saturates. NVIDIA's recipe (2506.08027) found training to
need it. The scale of `mx_floor` is 2^(floor(log2 max|group|) - floor(log2 format.max)), the rule of the OCP
specification. Under this rule the largest elements of a group may saturate. A group at the tensor's edge is smaller.
Along the widths of a linear, tiles and blocks may be cut but other groups may not (`Recipe.divisors`).

`nv` has two scales, as in appendix C of 2509.25149 and as Transformer Engine computes them, each step in float32. With
encode = 448 * format.max / max|tensor|, the largest group reaches E4M3's largest number. A group's E4M3 number is
max|group| * (encode / format.max), rounded to nearest, and its scale is that number / encode. If the number was rounded
down, the largest elements saturate.

The scales of the variants are those of Transformer Engine (`NVFP4BlockScaling`, read at d0067d0d). `nv_row`, its
row_scaled_activation, takes max|tensor| over the line. Under `nv_4over6`, encode = 256 * 6 / max|tensor|, which leaves
room in E4M3 for a factor of 1.5. A group's E4M3 number is max|group| / 6 * encode, or 1.5 times that number. In the
second case the largest magnitude becomes 4, below which values are closer together than 4 and 6 are. The error is the
sum of |value - element| (MAE, the default there; the authors' own code sums squares by default). Ties keep 6.

`int8/row/codes` applies to both operands of fprop: the codes themselves are multiplied, and the integer sums are scaled
(`int8.py`). No other GEMM can do this, because it contracts the dimension along which the scales of rows differ.

Two more words may follow the scale:

    hadamard       For both operands of a GEMM. Before the cast, each 16 elements along the contracted dimension are
                   multiplied by one orthonormal matrix, Hadamard's with random signs (`cast.rotated`). The product is
                   unchanged, and an outlier's magnitude is spread over 16 elements. Missing tokens are zeros.
    stochastic     For operands of dgrad and wgrad. Elements are rounded up or down with the probability (to 1/256) that
                   makes the expectation exact. The generator is the model's own, and its state is in checkpoints.
                   fprop has none, because a recomputation must give the same output. A dry run rounds to nearest.

Named recipes (`RECIPES`):

    fp8_hybrid     E4M3 input and weight, E5M2 grad_output, scale per tensor, results kept (Transformer Engine)
    fp8_delayed    the same with delayed scales, history 16
    fp8_delayed_1024    with history 1024, which is common in practice: values that have grown saturate, and values that
                   have shrunk underflow until the old maximum is forgotten
    deepseek_v3    E4M3 everywhere: tiles for input and grad_output, blocks for the weight, results kept (2412.19437)
    deepseek_v3_blocks    blocks for grad_output too, which that report found to diverge (its appendix B.2)
    mxfp8          E4M3 everywhere, mx, results kept
    mxfp4          the same in E2M1
    mxfp8_floor, mxfp4_floor    the same two with mx_floor
    nvfp4          E2M1 everywhere: nv for input and grad_output, nv2d for the weight, results kept; grad_output is
                   rounded stochastically, wgrad's operands are rotated (2509.25149)
    nvfp4_no_sr, nvfp4_no_rht, nvfp4_1d    the same without stochastic rounding, without the rotation, or with the
                   weight in nv: its values in dgrad then differ from those in fprop
    nvfp4_4over6   nvfp4_no_rht with input and weight in nv_4over6 and nv2d_4over6: Transformer Engine's
                   nvfp4_4over6="all", which does not change grad_output and has no rotation
    nvfp4_row_scaled    nvfp4_no_rht with the input in nv_row: its row_scaled_activation, which has no rotation either
    sim_<format>   the paper's quantization-simulated operators (E.2), everything per row: forward casts input, weight
                   and output, backward the incoming gradient and the resulting weight and input gradients; the backward
                   GEMMs see the weight and the input that the forward GEMM saw
    sim_bf16       BF16 operands and results with sums in FP32, as GEMMs in BF16: for a model in FP32
    llm_int8       INT8 input and weight in fprop, multiplied as integers, all else kept: fine-tuning (5.3, E.3)
    llm_int8_dgrad      the same, and dgrad reads the weight as fprop did, codes times scale
    bf16           nothing is cast

Users define recipes with `Recipe.of("mine", {"fprop": {"input": "e4m3/tile"}})`, or under `precision.recipes`.

The paper leaves some choices open. Here the scales of the simulated formats are float32, and the weight's rows are its
output channels in both GEMMs that read it. A bias is added before the output is cast. Its gradient is the sum of the
uncast grad_output, because that sum is not a GEMM. Delayed scales look back on optimizer steps, not on micro-batches.

DeepSeek-V3's recipe asks for FP32 accumulation, which is left to the kernels of the tensors' own dtype; 16-bit kernels
add up in FP32. If cuBLAS splits a sum it may join the parts in bfloat16, unless
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False. `gnmr train` sets this flag; other training
loops have to. Weight gradients and master weights have the parameters' dtype; the DeepSeek-V3 report keeps them in FP32
(`training.dtype=float32`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from gnmr import names as vocabulary
from gnmr.formats.number_formats import FORMATS, Format, KeepFormat, get_format
from gnmr.names import GEMMS

TILE, MX, NV, HADAMARD = 128, 32, 16, 16


@dataclass(frozen=True)
class Granularity:
    """Which elements share a scale, and what kind of number the scale is. By default all elements share one."""

    length: int | None = None
    """Elements of a group, which lies along the contracted dimension."""
    square: int | None = None
    """Side length of a square group."""
    per_row: bool = False
    """Whether each row is a group."""
    delayed: bool = False
    """Whether the scale comes from the steps before."""
    power_of_two: bool = False
    """Whether scales are powers of two (E8M0)."""
    rounds_down: bool = False
    """Whether powers of two are rounded down, as in the OCP specification."""
    two_levels: bool = False
    """Whether groups have E4M3 scales below a float32 scale of the tensor, or of a line."""
    per_line: bool = False
    """Whether each line along the contracted dimension has a float32 scale of its own."""
    four_over_six: bool = False
    """Whether the largest magnitude of each group becomes 4 or 6, whichever has the smaller error."""
    unscaled: bool = False
    """Whether there is no scale."""


GRANULARITIES = {
    "delayed": Granularity(delayed=True),
    "tensor": Granularity(),
    "block": Granularity(square=TILE),
    "row": Granularity(per_row=True),
    "nv2d": Granularity(square=NV, two_levels=True),
    "nv2d_4over6": Granularity(square=NV, two_levels=True, four_over_six=True),
    "tile": Granularity(length=TILE),
    "mx": Granularity(length=MX, power_of_two=True),
    "mx_floor": Granularity(length=MX, power_of_two=True, rounds_down=True),
    "nv": Granularity(length=NV, two_levels=True),
    "nv_4over6": Granularity(length=NV, two_levels=True, four_over_six=True),
    "nv_row": Granularity(length=NV, two_levels=True, per_line=True),
    "none": Granularity(unscaled=True),
}
"""Granularities of scales by their words, the coarsest first."""
SCALES = tuple(GRANULARITIES)


@dataclass(frozen=True)
class Cast:
    """A number format and the granularity of its scale. Raises ValueError if a value is invalid."""

    format: Format
    scale: str
    history: int = 16
    """Steps that a delayed scale looks back; ignored by other granularities."""
    codes: bool = False
    """Whether the GEMM multiplies the codes and scales its sums: fprop's operands in int8/row (`int8.py`)."""
    hadamard: bool = False
    """Whether the operand is rotated before the cast."""
    stochastic: bool = False
    """Whether the operand is rounded stochastically, if there is a generator."""
    outliers: float | None = None
    """Columns with at least this magnitude stay in 16 bits (only with `codes`); None: no column does."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"scale {self.scale!r} is not known: use one of {', '.join(SCALES)}")
        if isinstance(self.format, KeepFormat) != self.granularity.unscaled:
            raise ValueError(
                f"{self}: bf16 has no scale, and other formats have one: write bf16/none, or bf16 to cast nothing"
            )
        if self.history < 1:
            raise ValueError(f"history={self.history}: must be 1 or more")
        altered = self.hadamard or self.stochastic
        if self.codes and (altered or (self.format.name, self.scale) != ("int8", "row")):
            raise ValueError(f"{self}: only the codes of int8/row can be multiplied")
        if self.hadamard and self.delayed:
            raise ValueError(f"{self}: what a delayed scale remembers is not rotated; use another scale")
        if self.granularity.four_over_six and (self.stochastic or self.format.name != "e2m1"):
            raise ValueError(f"{self}: four over six chooses between values of e2m1 that are rounded to nearest")

    @staticmethod
    def of(word: str) -> Cast | None:
        """Return the cast that a word describes; None for `bf16`.

        Args:
            word: a format, a scale, and in any order the history of `delayed` in steps, `codes`, `hadamard` and
                `stochastic`: `e4m3/tile`, `e5m2/delayed/1024`, `int8/row/codes`, `e2m1/nv/hadamard/stochastic`.

        Raises:
            ValueError: a part of the word is not known, or does not fit the others.
        """
        # A word without a scale gets an empty one, which is valid for `bf16` alone.
        name, scale, *more = (*word.split("/"), "")[: max(2, word.count("/") + 1)]
        fmt = get_format(name)
        if isinstance(fmt, KeepFormat) and not scale:
            return None
        options: dict[str, Any] = {}
        for option in more:
            key = option if option in ("codes", "hadamard", "stochastic") else "history"
            if key in options or (key == "history" and not (scale == "delayed" and option.isdecimal())):
                raise ValueError(
                    f"{word}: after the scale comes the history of delayed, a number, or one of codes, hadamard or "
                    "stochastic"
                )
            options[key] = int(option) if key == "history" else True
        return Cast(fmt, scale, **options)

    @property
    def granularity(self) -> Granularity:
        """The rule of the scales."""
        return GRANULARITIES[self.scale]

    @property
    def directed(self) -> bool:
        """Whether the result depends on the dimension that the GEMM contracts."""
        return self.granularity.length is not None or self.hadamard

    @property
    def two_levels(self) -> bool:
        """Whether groups have E4M3 scales below a scale of the tensor, or of one of its lines."""
        return self.granularity.two_levels

    @property
    def delayed(self) -> bool:
        """Whether the scale comes from the steps before."""
        return self.granularity.delayed

    @property
    def one_scale(self) -> bool:
        """Whether all elements share one scale."""
        return self.group(0) == (None, None)

    def group(self, contraction_dim: int) -> tuple[int | None, int | None]:
        """Return which elements of a matrix share a scale, if the GEMM contracts its dimension 0 (rows) or 1.

        Returns: (rows, columns) of a group; None in a place means all of them.
        """
        rule = self.granularity
        if rule.square is not None:
            return rule.square, rule.square
        if rule.length is not None:
            # Groups lie along the contracted dimension, so that partial sums of a GEMM have one scale per operand.
            return (rule.length, 1) if contraction_dim == 0 else (1, rule.length)
        return (1 if rule.per_row else None), None

    def __str__(self) -> str:
        history = f"/{self.history}" if self.delayed and self.history != 16 else ""
        more = "".join(f"/{key}" for key in ("codes", "hadamard", "stochastic") if getattr(self, key))
        return f"{self.format.name}/{self.scale}{history}{more}"


@dataclass(frozen=True)
class Gemm:
    """The casts of one GEMM's two operands and of its result; None keeps a tensor unchanged."""

    input: Cast | None = None
    weight: Cast | None = None
    grad_output: Cast | None = None
    result: Cast | None = None

    @staticmethod
    def of(**words: str) -> Gemm:
        """Return the GEMM with these casts, as in Gemm.of(input="e4m3/tile", weight="e4m3/block").

        Raises:
            ValueError: a word names no cast.
        """
        return Gemm(**{operand: Cast.of(word) for operand, word in words.items()})

    @property
    def casts(self) -> list[Cast]:
        """The casts of the operands and the result, without tensors that are kept."""
        return [cast for field in fields(self) if (cast := getattr(self, field.name)) is not None]


READS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""The operands of each GEMM."""


@dataclass(frozen=True)
class Recipe:
    """The casts of a linear operator. Raises ValueError if a GEMM has a cast of an operand that it does not read."""

    name: str
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    backend: str = "simulated"
    """The backend that runs the GEMMs: simulated, scaled_mm or int_mm (`gnmr.conversion.resolve`)."""

    @staticmethod
    def of(name: str, gemms: Mapping[str, Mapping[str, str]]) -> Recipe:
        """Return a user-defined recipe, as in Recipe.of("mine", {"fprop": {"input": "e4m3/tile"}}).

        Args:
            name: letters, digits, - and _.
            gemms: {gemm: {operand: cast}}, where an operand may be `result`; those that are not named are kept
                unchanged.

        Raises:
            ValueError: a word, operand or GEMM does not exist, or the name is taken; the message is one line.
        """
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"recipe {name!r}: a name is letters, digits, - and _, and begins with no digit")
        # Paths are chosen by name, so a recipe must not shadow a format or another recipe.
        if name in RECIPES or name in FORMATS:
            raise ValueError(
                f"recipe {name}: is a {'format' if name in FORMATS else 'recipe'} already; name it otherwise"
            )
        gemms_of_recipe: dict[str, Any] = {}
        for gemm, words in _mapping(name, gemms, "{gemm: {operand: cast}}, as {fprop: {input: e4m3/tile}}").items():
            if gemm not in GEMMS:
                raise ValueError(f"recipe {name}: {gemm!r} is not a GEMM: use {', '.join(GEMMS)}")
            for operand, word in _mapping(f"{name}: {gemm}", words, "{operand: cast}, as {input: e4m3/tile}").items():
                if operand not in (operands := (*READS[gemm], "result")):
                    raise ValueError(f"recipe {name}: {gemm} has no {operand!r}: use {', '.join(operands)}")
                if not isinstance(word, str):
                    raise ValueError(
                        f"recipe {name}: {gemm}.{operand}={word}: must be a word such as e4m3/tile, or bf16"
                    )
            try:
                gemms_of_recipe[gemm] = Gemm.of(**words)
            except ValueError as error:
                raise ValueError(f"recipe {name}: {gemm}: {error}") from error
        return Recipe(name, **gemms_of_recipe)

    def __post_init__(self) -> None:
        for name, operands in READS.items():
            gemm: Gemm = getattr(self, name)
            if foreign := [o for o in ("input", "weight", "grad_output") if o not in operands and getattr(gemm, o)]:
                raise ValueError(f"recipe {self.name}: {name} reads {' and '.join(operands)}, not {foreign[0]}")
            # A result is not contracted yet and has no history, so most granularities mean nothing for it.
            if gemm.result is not None and gemm.result.scale not in ("tensor", "row", "none"):
                raise ValueError(f"recipe {self.name}: {name}'s result cannot be {gemm.result}; use tensor or row")
            # A rotation cancels only if both operands have it.
            rotated = [cast is not None and cast.hadamard for cast in (getattr(gemm, o) for o in operands)]
            if len(set(rotated)) > 1 or (gemm.result is not None and gemm.result.hadamard):
                raise ValueError(f"recipe {self.name}: {name}: hadamard is for both of {' and '.join(operands)}")
            # A recomputed forward pass has to give the same output, so fprop draws nothing.
            if any(cast.stochastic and (name == "fprop" or cast is gemm.result) for cast in gemm.casts):
                raise ValueError(f"recipe {self.name}: {name}: stochastic is for operands of dgrad and wgrad")
            # Sums of codes can be scaled afterwards only in fprop; other GEMMs contract over rows that differ in scale.
            codes = [cast.codes for cast in gemm.casts]
            if any(codes) and (name != "fprop" or codes != [True, True] or gemm.result is not None):
                raise ValueError(f"recipe {self.name}: codes are for both operands of fprop, whose result is kept")

    def words(self) -> dict[str, dict[str, str]]:
        """Return {gemm: {operand: cast}}, the argument of `of`, without tensors that are kept."""
        return {
            gemm: {key: str(cast) for key, cast in vars(getattr(self, gemm)).items() if cast is not None}
            for gemm in GEMMS
        }

    @property
    def casts(self) -> list[Cast]:
        """The casts of all three GEMMs, in their order."""
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
        """Steps that the recipe's delayed scales look back; 0 without delayed scales."""
        return max((cast.history for cast in self.casts if cast.delayed), default=0)

    def with_gemms(self, recipes: Mapping[str, Recipe]) -> Recipe:
        """Return this recipe with GEMMs taken from others, {gemm: recipe}; that recipe itself if all come from one.

        >>> RECIPES["nvfp4"].with_gemms({"fprop": RECIPES["mxfp8"], "dgrad": RECIPES["bf16"]}).name
        'mxfp8 in fprop and bf16 in dgrad'

        Returns: a recipe on the backend of this one, named after the others.
        """
        taken = {gemm: recipes[gemm] for gemm in GEMMS if gemm in recipes}
        of: dict[str, list[str]] = {}
        for gemm, recipe in taken.items():
            of.setdefault(recipe.name, []).append(gemm)
        # Three GEMMs of one recipe are that recipe, under its own name.
        if not taken or (len(taken) == len(GEMMS) and len(of) == 1):
            return taken.get("fprop", self)
        name = " and ".join(f"{recipe} in {', '.join(gemms)}" for recipe, gemms in of.items())
        return replace(self, name=name, **{gemm: getattr(recipe, gemm) for gemm, recipe in taken.items()})

    def divisors(self) -> tuple[int, int]:
        """Return the numbers of which a linear's inputs and outputs must be multiples.

        No group of MX or NVFP4 may be cut, and no rotated group. Tiles and blocks may be cut.
        """
        # The two dimensions of each operand are tokens (None), inputs (0) or outputs (1).
        dims = {"input": (None, 0), "weight": (1, 0), "grad_output": (None, 1)}
        contracted = {"fprop": 0, "dgrad": 1, "wgrad": None}
        needed = [1, 1]
        for gemm, operands in READS.items():
            for operand in operands:
                cast: Cast | None = getattr(getattr(self, gemm), operand)
                if cast is None:
                    continue
                # wgrad contracts the tokens (None), whose number these divisors do not limit.
                along = dims[operand].index(contracted[gemm])
                lengths = (
                    [1, 1] if TILE in cast.group(along) else list(cast.group(along))
                )  # tiles and blocks may be cut
                if cast.hadamard:
                    lengths[along] = max(lengths[along] or 1, HADAMARD)
                for dim, length in zip(dims[operand], lengths, strict=True):
                    if dim is not None and length is not None:
                        needed[dim] = max(needed[dim], length)  # 1, 16 or 32: multiples of each other
        return needed[0], needed[1]


def _mapping(place: str, value: Mapping[str, Any], form: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"recipe {place}={value}: must be {form}")
    return value


def _recipe(name: str, words: vocabulary.Words) -> Recipe:
    fprop, dgrad, wgrad = (Gemm.of(**words.get(gemm, {})) for gemm in GEMMS)
    return Recipe(name, fprop, dgrad, wgrad)


RECIPES = {name: _recipe(name, words) for name, words in vocabulary.RECIPES.items()}

ExecutionPath: TypeAlias = Format | Recipe
"""An operator's precision: a format compresses the saved input, a recipe casts operands."""


def described(path: ExecutionPath) -> str:
    """Return how a path is called in tables and states.

    Returns: its name; for a recipe with casts also its backend and the columns that stay in 16 bits.
    """
    if not isinstance(path, Recipe) or not path.casts:
        return path.name
    outliers = None if path.fprop.input is None else path.fprop.input.outliers
    return f"{path.name}, {path.backend}{'' if outliers is None else f', columns from {outliers:g} in 16 bits'}"
