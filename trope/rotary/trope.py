"""T-RoPE, the paper: queries and keys are rotated by *when* events happened instead of by their index.

Read `TRoPE` first; `TORoPE` and `IndexRoPE` are the encodings it is compared with. Notable:
- phases are exact: float64 turns, whole turns dropped, then float32 (docs/method.md, "Exact phases");
- `conditioning="span"` learns frequencies in coordinates the optimiser can move in (docs/method.md, "Conditioning");
- the query is rotated at the time of the *next* event, the last one at `t_now` (`query_times`);
- the key's conjugate rotation is a sign on its coefficient, so one kernel serves every variant.

Shape letters: B batch, L positions, T jagged tokens, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trope.kernels import Backend
from trope.kernels.silu_rotate import Turns
from trope.rotary import checks as validate
from trope.rotary.base import CosSin, Layout, Rotary, event_index, float64, from_bits, sequence_of
from trope.rotary.baselines import IndexRoPE, TORoPE

__all__ = [
    "NEUTRAL_SPAN", "CosSin", "IndexRoPE", "TORoPE", "TRoPE",
    "calendar_bank", "frequency_bank", "frequency_parameters", "query_times",
]  # fmt: skip

DAY, WEEK, YEAR = 86_400.0, 604_800.0, 365.2425 * 86_400.0  # the Gregorian mean year

# Without a given time span T-RoPE is conditioned for events from 2000 to 2030: wide enough for any real log, so that
# one optimiser step moves a phase by O(lr) anywhere in it. A log's own span lets frequencies adapt faster.
NEUTRAL_SPAN = (946_684_800, 1_893_456_000)
NEUTRAL_INDEX_SPAN = (0, 10_000)  # for position="index": what index RoPE's own bank resolves
CALENDAR_PERIODS = 24  # year, week, day and their fractions down to some hours, for alpha_init="calendar"
STEP = 8.0  # one unit of delta turns a plane by this many radians over the whole time span


def frequency_bank(planes: int, beta_min: float = 1e2, beta_max: float = 1e8) -> Tensor:
    """Base time constants beta_d in seconds, geometric from beta_min to beta_max, float64 [P] (eq. geomspace)."""
    if planes < 1 or not 0 < beta_min <= beta_max:
        raise ValueError(
            f"a bank needs at least one plane and 0 < beta_min <= beta_max, got {planes} planes, beta_min {beta_min:g} "
            f"and beta_max {beta_max:g}"
        )
    return torch.logspace(math.log10(beta_min), math.log10(beta_max), planes, dtype=torch.float64)


def calendar_bank(planes: int) -> Tensor:
    """beta of calendar harmonics, float64 [P]: year, week, day, year/2, week/2, day/2, ... each period once."""
    periods: list[float] = []
    harmonic = 0
    while len(periods) < planes:
        harmonic += 1
        for period in (YEAR / harmonic, WEEK / harmonic, DAY / harmonic):
            if not any(math.isclose(period, known) for known in periods):  # week/7 is the day
                periods.append(period)
    return torch.tensor(periods[:planes], dtype=torch.float64) / (2 * math.pi)


def query_times(
    times: Tensor,
    lengths: Tensor | None = None,
    t_now: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    allow_past: bool = False,
    check_values: bool = True,
    later: bool = False,
) -> Tensor:
    """The time each query looks from: the next event's; for a sequence's last event `t_now`, or its own without one.

    Section 3.4 (eq. shifted) and Algorithm 1 lines 3-4, except that the shift stops at each sequence's own end: rolling
    a padded batch would read the padding there.

    Args:
        times: Unix seconds, int64 (or float64), [B, L], or [T] with `offsets`.
        lengths: [B] valid events per row; None means all.
        t_now: [B] the moment each recommendation is made for.
        offsets: [B + 1] where each jagged sequence begins.
        allow_past: accept a `t_now` before the last event.
        check_values: read the times to refuse bad ones.
        later: the next *later* time instead, for events that share one, such as the lines of a basket.
    """
    validate.check_events(times, lengths, offsets, t_now)
    if check_values and validate.can_read_values(times):
        validate.check_event_values(times, lengths, offsets, t_now, allow_past)
    shifted = _shift(times, lengths, t_now, offsets)
    if not later:
        return shifted
    # From each event on, the first one that looks at another time than its own, or is its sequence's last.
    index = torch.arange(times.shape[-1], device=times.device)
    if offsets is not None:
        ends_here = index + 1 == offsets[sequence_of(index, offsets) + 1]
    else:
        ends_here = index >= (times.shape[1] - 1 if lengths is None else lengths[:, None] - 1)
    place = torch.where((shifted > times) | ends_here, index, times.shape[-1] - 1)
    return shifted.gather(-1, place.flip(-1).cummin(-1).values.flip(-1))


def _shift(times: Tensor, lengths: Tensor | None, t_now: Tensor | None, offsets: Tensor | None) -> Tensor:
    following = times.roll(-1, dims=-1)
    index = torch.arange(times.shape[-1], device=times.device)
    if offsets is not None:
        row_T = sequence_of(index, offsets)
        return torch.where(index + 1 == offsets[row_T + 1], times if t_now is None else t_now[row_T], following)
    last = times.shape[1] - 1 if lengths is None else lengths[:, None] - 1
    shifted = torch.where(index == last, times if t_now is None else t_now[:, None], following)
    return shifted if lengths is None else torch.where(index <= last, shifted, times)  # padding keeps its own value


class TRoPE(Rotary):
    """Time-aware rotary position embedding: queries turn by +alpha_q * t / beta, keys by -alpha_k * t / beta.

    The score of plane d then turns by (alpha_q * t_query + alpha_k * t_key) / beta_d (eq. attention), which knows the
    calendar, not only the gap. `TRoPE(head_dim)` is the method; each of its five parts has a switch.

    Args:
        head_dim: dims per head, D.
        rotary_dim: how many of them rotate, even; the rest passes through. All by default.
        time_span: (first, last) time of the training data, Unix seconds; NEUTRAL_SPAN by default. In the checkpoint.
        position: rotate by "times", or by "index" (part 1 off).
        learnable: learn the coefficients (part 2); False freezes them as they were drawn.
        multiscale: a geometric bank of beta (part 3); False gives every plane their geometric mean.
        shifted: the query looks from the next event's time, the last from `t_now` (part 4); False: from its own.
        conjugate: the key turns the other way (part 5, the non-stationary key).
        rotate_query, rotate_key: rotate only one side, for ablations.
        share_alpha: one coefficient for query and key, as Theorems 1 and 2 assume. With independent ones, `conjugate`
            only renames alpha_k to -alpha_k: the same family of functions.
        alpha_init: coefficients start from N(0, 1) as in the paper, or at "ones" (plain timestamp RoPE), or at
            "calendar": drawn as in the paper, then moved so that each plane's period is the nearest of the calendar's
            (year, week, day and their first fractions); planes slower than a year or faster than those stay as drawn.
        stationary: share of the planes whose query and key share a coefficient and direction: they know the gap and not
            the date. stationary_planes: which; "slow", since a plane slower than the data can only memorise the date,
            or "fast", since many fast absolute planes are a hash of the moment.
        step: s of the conditioning: one unit of delta turns a plane by so many radians over the time span.
        bank: "geometric"; or "calendar": the first half of the planes stationary (shared coefficient, no conjugate) on
            the geometric bank up to the time span, the second half absolute on frozen calendar harmonics.
        beta_min, beta_max: ends of the geometric bank, seconds (for position="index": 1 and 1e4 steps).
        conditioning: "span" learns delta in alpha = alpha0 + 8 * delta * beta / T, about the middle of the time span;
            "paper" learns alpha itself on uncentred times.
        phase: "exact", or "fp32" for the paper's arithmetic.
        layout: a plane is (x[2p], x[2p + 1]) if "interleaved", as in the paper; (x[p], x[P + p]) if "halves".
        require_t_now: refuse calls without `t_now`; switch it on for serving.
        backend: "auto", "torch" or "triton".
        check_values: read the times to refuse bad ones. On a GPU that waits for the device a few times a call; switch
            it off where the data have been checked before.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        time_span: tuple[int, int] | None = None,
        position: Literal["times", "index"] = "times",
        learnable: bool = True,
        multiscale: bool = True,
        shifted: bool = True,
        conjugate: bool = True,
        rotate_query: bool = True,
        rotate_key: bool = True,
        share_alpha: bool = False,
        alpha_init: Literal["normal", "ones", "calendar"] = "normal",
        stationary: float = 0.0,
        stationary_planes: Literal["slow", "fast"] = "slow",
        step: float = STEP,
        bank: Literal["geometric", "calendar"] = "geometric",
        beta_min: float | None = None,
        beta_max: float | None = None,
        conditioning: Literal["span", "paper"] = "span",
        phase: Literal["exact", "fp32"] = "exact",
        layout: Layout = "interleaved",
        require_t_now: bool = False,
        backend: Backend = "auto",
        check_values: bool = True,
    ) -> None:
        super().__init__(head_dim, rotary_dim, layout, backend, check_values)
        validate.check_choice("position", position, ("times", "index"))
        validate.check_choice("bank", bank, ("geometric", "calendar"))
        validate.check_choice("alpha_init", alpha_init, ("normal", "ones", "calendar"))
        validate.check_choice("conditioning", conditioning, ("span", "paper"))
        validate.check_choice("phase", phase, ("exact", "fp32"))
        validate.check_choice("stationary_planes", stationary_planes, ("slow", "fast"))
        by_index = position == "index"
        if bank == "calendar" and (by_index or not multiscale or self.planes < 2):
            raise ValueError('bank="calendar" needs times, multiscale=True and at least two planes')
        if not 0 <= stationary <= 1 or (stationary and bank == "calendar"):
            raise ValueError(
                f"stationary must be a share of the planes, from 0 to 1, got {stationary}"
                + ('; bank="calendar" has its own stationary half' if bank == "calendar" else "")
            )
        if stationary and not (rotate_query and rotate_key):
            raise ValueError("stationary planes turn queries and keys alike; rotate both, or set stationary to 0")
        if not step > 0:
            raise ValueError(f"step must be greater than 0, got {step}")
        self.position, self.bank, self.conditioning, self.phase = position, bank, conditioning, phase
        self.learnable, self.multiscale, self.shifted, self.conjugate = learnable, multiscale, shifted, conjugate
        self.rotate_query, self.rotate_key, self.require_t_now = rotate_query, rotate_key, require_t_now
        self.beta_min = (1.0 if by_index else 1e2) if beta_min is None else beta_min
        self.beta_max = (1e4 if by_index else 1e8) if beta_max is None else beta_max
        # Absolute calendar planes are frozen: only the first `learned` planes have a coefficient.
        self.learned = self.planes // 2 if bank == "calendar" else self.planes
        self.step = step
        # The absolute planes come first: the fastest of the geometric bank, or the slowest in a bank that is reversed.
        self.absolute = self.planes - round(stationary * self.planes)
        self.is_reversed = stationary > 0 and stationary_planes == "fast"
        self._linear_cache: tuple[list[Any], tuple[Tensor, ...]] | None = None
        self.shared = share_alpha or bank == "calendar"

        if conditioning == "span":
            first, last = validate.check_span(time_span or (NEUTRAL_INDEX_SPAN if by_index else NEUTRAL_SPAN))
            self.register_buffer("t0", torch.tensor((first + last) // 2))
            self.register_buffer("span", torch.tensor(last - first))
        elif time_span is not None:
            raise ValueError('conditioning="paper" uses times as they are and takes no time_span; leave it out')
        # float64 constants live in an int64 buffer, bit for bit: that survives .half() and devices without float64.
        self.register_buffer("_bank_bits", self._bank().view(torch.int64), persistent=False)
        self.register_load_state_dict_post_hook(_rebuild_bank)
        for side, present in (("q", rotate_query or self.shared), ("k", rotate_key and not self.shared)):
            if present:
                alpha = torch.ones(self.learned) if alpha_init == "ones" else torch.randn(self.learned)
                if alpha_init == "calendar":
                    alpha = _to_calendar(alpha, self.betas[: self.learned])
                self._add_coefficients(side, alpha if side == "q" else alpha[: self.absolute])

    def _add_coefficients(self, side: str, alpha: Tensor) -> None:
        if self.conditioning == "paper" and self.learnable:
            self.register_parameter(f"alpha_{side}", nn.Parameter(alpha))
            return
        self.register_buffer(f"alpha0_{side}", alpha)
        if self.learnable:
            self.register_parameter(f"delta_{side}", nn.Parameter(torch.zeros_like(alpha)))

    def _bank(self) -> Tensor:
        """beta, 2 pi beta and d alpha / d delta of every plane, float64 [3, P]: constants, so that no exporter rounds
        a literal 2 pi to float32 and no step divides again."""
        span = float(self.get_buffer("span").item()) if self.conditioning == "span" else math.inf
        upper = self.beta_max
        if self.bank == "calendar":
            upper = max(self.beta_min, min(upper, span))
        betas = frequency_bank(self.learned, self.beta_min, upper)
        if self.is_reversed:
            betas = betas.flip(0)
        if not self.multiscale:
            betas = torch.full_like(betas, math.sqrt(self.beta_min * self.beta_max))
        if self.bank == "calendar":
            betas = torch.cat((betas, calendar_bank(self.planes - self.learned)))
        # The change of coordinates: one unit of delta turns time t by step * (t - t0) / T, whatever beta is.
        return torch.stack((betas, 2 * math.pi * betas, self.step * betas / span))

    def set_bank(self, beta_min: float, beta_max: float) -> None:
        """Another range of the frequency bank, seconds."""
        self.beta_min, self.beta_max = beta_min, beta_max
        self.get_buffer("_bank_bits").copy_(self._bank().view(torch.int64))

    def _constants(self) -> Tensor:
        return from_bits(self.get_buffer("_bank_bits"))

    @property
    def betas(self) -> Tensor:
        """The frequency bank: beta of every plane in seconds, float64 [P]."""
        return self._constants()[0]

    def alpha(self, side: Literal["q", "k"]) -> Tensor:
        """The coefficients in effect, float64 [P]: alpha_q or alpha_k of eq. learnable, zeros if that side is off."""
        betas = self.betas
        if not (self.rotate_query if side == "q" else self.rotate_key):
            return torch.zeros_like(betas)
        alpha = self._own_alpha("q" if self.shared else side)
        if self.learned < self.planes:
            return torch.cat((alpha, torch.ones_like(betas[self.learned :])))
        # Stationary planes of the key have the query's coefficients.
        return torch.cat((alpha, self._own_alpha("q")[len(alpha) :])) if len(alpha) < self.planes else alpha

    def _own_alpha(self, side: str) -> Tensor:
        """The coefficients of one side that have values of their own, float64."""
        if self.conditioning == "paper" and self.learnable:
            return float64(self.get_parameter(f"alpha_{side}"))
        alpha = float64(self.get_buffer(f"alpha0_{side}"))
        if not self.learnable:
            return alpha
        return alpha + self._constants()[2][: len(alpha)] * float64(self.get_parameter(f"delta_{side}"))

    def _signed_alpha(self) -> tuple[Tensor, Tensor]:
        """Query and key coefficients with the key's direction: conjugate planes turn by the negative angle."""
        alpha_q, alpha_k = self.alpha("q"), self.alpha("k")
        if not self.conjugate:
            return alpha_q, alpha_k
        if self.bank == "geometric":
            return alpha_q, self._direction() * alpha_k
        return alpha_q, torch.cat((alpha_k[: self.learned], -alpha_k[self.learned :]))

    def _direction(self) -> Tensor:
        """Of the key's planes: -1 where they turn the other way, float64 [P]."""
        betas = self.betas
        return torch.where(torch.arange(self.planes, device=betas.device) < self.absolute, -1.0, 1.0).to(betas)

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """alpha / (2 pi beta) of the query planes and, signed, of the key planes: turns per second, float64 [1, P]."""
        alpha_q, alpha_k = self._signed_alpha()
        periods = self._constants()[1]
        return (alpha_q / periods)[None], (alpha_k / periods)[None]

    def turns(self) -> Turns:
        """Frequencies are linear in the coefficients; where all of them are learned, kernels take them apart."""
        if not self.is_linear:
            return super().turns()
        name = "alpha" if self.conditioning == "paper" else "delta"
        deltas_q: Tensor = self.get_parameter(f"{name}_q")
        deltas_k = deltas_q if self.shared else self.get_parameter(f"{name}_k")
        if len(deltas_k) < self.planes:
            deltas_k = torch.cat((deltas_k, deltas_q[len(deltas_k) :]))
        freqs_q, freqs_k, slopes_q, slopes_k, origin = self._linear()
        return Turns(freqs_q, freqs_k, slopes_q, slopes_k, deltas_q, deltas_k, origin)

    @property
    def is_linear(self) -> bool:
        """Whether every frequency is a constant plus a constant times its own coefficient, in both directions."""
        is_learned = self.learnable and self.bank == "geometric" and self.rotate_query and self.rotate_key
        return is_learned and self.phase == "exact" and self.get_buffer("_bank_bits").device.type != "mps"

    def _linear(self) -> tuple[Tensor, ...]:
        """Frequencies of query and key where the coefficients are 0, what a unit of one adds, float64 [1, P]; and the
        origin, 1970 where there is no conditioning."""
        if torch.compiler.is_compiling():  # a traced tensor has no address
            return self._form_linear()
        # They change when a checkpoint is loaded or the module moves; in between they are not worth a dozen launches.
        # A tensor of inference mode has no version, and nothing outside of it writes to one.
        buffers = [x for x in self._buffers.values() if x is not None]
        key = [(x.data_ptr(), None if x.is_inference() else x._version, x.device) for x in buffers]
        if self._linear_cache is None or self._linear_cache[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # kept beyond whoever asks first
                self._linear_cache = (key, self._form_linear())
        return self._linear_cache[1]

    def _form_linear(self) -> tuple[Tensor, ...]:
        _, periods, gain = self._constants()
        bases, slopes = [], []
        one = torch.ones_like(periods)
        for side, sign in (("q", one), ("k", self._direction() if self.conjugate else one)):
            base = torch.zeros_like(periods)
            if self.conditioning == "span":
                start = self.get_buffer(f"alpha0_{'q' if self.shared else side}")
                start = torch.cat((start, self.get_buffer("alpha0_q")[len(start) :]))
                base = start.double() / periods
            slope = 1 / periods if self.conditioning == "paper" else gain / periods
            bases.append((sign * base)[None])
            slopes.append((sign * slope)[None])
        origin = self._buffers.get("t0")
        return (*bases, *slopes, torch.zeros_like(self.get_buffer("_bank_bits")[0, 0]) if origin is None else origin)

    def paper_phase(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.phase == "exact":
            return None
        device = self.get_buffer("_bank_bits").device
        alpha_q, alpha_k = self._signed_alpha()
        return alpha_q.float()[None].to(device), alpha_k.float()[None].to(device), self.betas.float().to(device)

    def coordinates(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert times is not None
        by_index = self.position == "index"
        index = event_index(shape, offsets, times.device) if by_index else times
        looking_from = _shift(times, lengths, t_now, offsets) if self.shifted and not by_index else times
        return self.coordinates_at(times, looking_from, index)

    def coordinates_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = self.uncentred_at(times, query_times, index)
        if self.conditioning == "span":
            origin = self.get_buffer("t0")
            queries, keys = queries - origin, keys - origin
        return queries, keys

    def uncentred_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates without the origin, for a kernel that subtracts it itself."""
        if self.position == "index":
            keys, queries = index, index + 1 if self.shifted else index
        else:
            keys, queries = times, query_times if self.shifted else times
        return queries[None], keys[None]

    def check_call(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None, allow_past: bool,
    ) -> None:  # fmt: skip
        if self.require_t_now and t_now is None:
            raise ValueError("t_now is required here (require_t_now=True), got None; pass the moment to recommend for")
        super().check_call(shape, times, lengths, t_now, offsets, allow_past)

    def extra_repr(self) -> str:
        parts = ("learnable", "multiscale", "shifted", "conjugate", "rotate_query", "rotate_key")
        off = [part for part in parts if not getattr(self, part)]
        choices = f"position={self.position}, bank={self.bank}, conditioning={self.conditioning}, phase={self.phase}"
        return f"{super().extra_repr()}, {choices}" + (f", without {', '.join(off)}" if off else "")


def _to_calendar(alpha: Tensor, betas: Tensor) -> Tensor:
    """Coefficients of the same signs whose planes have the nearest periods of the calendar, where it has one."""
    periods = 2 * math.pi * betas / alpha.double().abs()
    known = 2 * math.pi * calendar_bank(CALENDAR_PERIODS)
    nearest = known[(periods.log()[:, None] - known.log()).abs().argmin(dim=1)]
    is_inside = (periods >= known.min()) & (periods <= known.max())
    moved = alpha.sign() * 2 * math.pi * betas / nearest
    return torch.where(is_inside, moved, alpha.double()).float()


def _rebuild_bank(module: nn.Module, _: object) -> None:
    """The calendar bank ends at the time span, which a checkpoint brings along."""
    assert isinstance(module, TRoPE)
    module.set_bank(module.beta_min, module.beta_max)


def frequency_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learned coefficients of every rotary encoding in a model: give them an optimiser group without decay."""
    for module in model.modules():
        if isinstance(module, Rotary):
            yield from module.parameters(recurse=False)
