"""Credit methods: the rewards along a trajectory -> the credit of each denoising step.

A method is a pure function `(rewards [T+1, B], groups [B], **options) -> credit [T, B]`, in sampling order: rewards[0] scores the
completion from the initial noise, rewards[T] the final image, and step i leads from rewards[i] to rewards[i+1]. (The papers count
levels downwards: k = T - i.) NaN marks a score that failed or was not taken; a credit that depends on it is NaN and no other is.
Your own method is such a function, given to `advantages` in place of a name.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from densegrpo_jax.credit import normalize

# Below this total rise of the similarity (a cosine) CoCA's shares are noise over noise, and all steps share alike.
COCA_MIN_RISE = 1e-3


def flow_grpo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The final reward, the same for every step: R_T. Reads no other score.

    Args:
      rewards: [T+1, B]. groups: [B], not used.

    Returns:
      [T, B] credit.

    Reference: Flow-GRPO, arXiv 2505.05470.
    """
    rewards = _scores(rewards, groups)
    return np.repeat(rewards[-1:], len(rewards) - 1, axis=0)


def dense_grpo(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    gamma: float = 0.0,
    baseline: np.ndarray | None = None,
    slope: Literal["one", "fitted"] = "one",
) -> np.ndarray:
    """The gain of each step, g_i = R_{i+1} - R_i, and with gamma > 0 the discounted gains still to come.

    c_i = sum_{j >= i} gamma^(j-i) g_j. gamma = 0 is the paper; gamma = 1 is R_T - R_i, the sparse return with a state baseline.

    R_i is settled before step i is taken, so any multiple of it is as good a baseline. "fitted" subtracts b_i R_i, with b_i the slope of
    R_{i+1} against R_i within the groups, pooled over the batch: the multiple that leaves the least variance. Where a step all but
    draws the picture anew, R_i is mostly noise to it and b_i is small; where it changes little, b_i is near 1 and this is the gain.

    Args:
      rewards: [T+1, B]. groups: [B], not used.
      gamma: discount in [0, 1].
      baseline: [T, B] subtracted in place of rewards[:-1]: the reward after a noise-free step i, completed by the same coarse solver
        as rewards[i+1], so that no noise means no gain. NaN where it failed.
      slope: "one" as in the paper, or "fitted" (ours), for gamma = 0.

    Returns:
      [T, B] credit.

    Raises:
      ValueError: gamma outside [0, 1], gamma > 0 with a fitted slope, another slope, or a baseline of the wrong shape.

    Reference: DenseGRPO, arXiv 2601.20218, eq. 7 to 9.
    """
    rewards = _scores(rewards, groups)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    before = rewards[:-1] if baseline is None else np.asarray(baseline, np.float64)
    if before.shape != rewards[:-1].shape:
        raise ValueError(f"baseline must be [T, B] = {rewards[:-1].shape}, got {before.shape}")
    if slope not in ("one", "fitted"):
        raise ValueError(f'slope must be "one" or "fitted", got {slope!r}')
    if slope == "fitted":
        if gamma > 0:
            raise ValueError(f"a fitted slope is for gamma = 0, got gamma = {gamma}: later gains would need slopes of their own")
        return rewards[1:] - _slope(before, rewards[1:], groups) * before
    credit = rewards[1:] - before
    if gamma > 0:  # not a special case of the loop: 0 * NaN would spread one failed score over all earlier steps
        for i in reversed(range(len(credit) - 1)):
            credit[i] += gamma * credit[i + 1]
    return credit


def _slope(before: np.ndarray, after: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Least-squares slope of `after` against `before` [T, B] within groups, pooled over groups: [T, 1]. 0 where nothing varies."""
    there = ~np.isnan(before + after)
    products, squares = np.zeros((2, len(before)))
    for group in np.unique(groups):
        for t, chosen in enumerate(there & (np.asarray(groups) == group)):
            if chosen.any():
                x = normalize.deviations(before[t, chosen])
                products[t] += (x * after[t, chosen]).sum()
                squares[t] += (x**2).sum()
    return (products / np.where(squares > 0, squares, 1.0))[:, None]


def dense_reward(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The reward after each step, R_{i+1}, without the one before subtracted: DenseGRPO's ablation (section 5.3).

    Args:
      rewards: [T+1, B]. groups: [B], not used.

    Returns:
      [T, B] credit.
    """
    return _scores(rewards, groups)[1:]


def stepwise(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The gain of each step, R_{i+1} - R_i; what differs from DenseGRPO is the normalisation, over all steps of a group jointly.

    Jointly means that a step whose mean gain is above the group's gives all members a positive advantage: a legal baseline, constant
    at each step, of higher variance.

    Args:
      rewards: [T+1, B]. groups: [B], not used.

    Returns:
      [T, B] credit.

    Reference: Stepwise-Flow-GRPO, arXiv 2603.28718.
    """
    return np.diff(_scores(rewards, groups), axis=0)


def tp_grpo(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    variant: Literal["constrained", "loose"] = "constrained",
    balance: bool = True,
    first_step: bool = True,
) -> np.ndarray:
    """Gains, replaced at turning points by all that follows: R_T - R_i.

    Step i is a turning point if it goes with the trajectory's trend, sign(R_T - R_0), and step i-1 went against it; "constrained"
    asks also that what remains, R_T - R_{i+1}, goes the same way. A zero never qualifies. A step is NaN if a score that decides about
    it failed: those around it and before it, R_0 and R_T.

    Args:
      rewards: [T+1, B]; the paper assumes a common initial noise within a group. groups: [B], not used.
      variant: "loose" (Def. 4.1) or "constrained" (Def. 5.1).
      balance: of the positive and the negative replacements of the batch keep equally many, those of largest |R_T - R_i| (of equals,
        the earlier step, then the earlier trajectory); the others stay plain gains (App. D).
      first_step: the first step, which has no predecessor, may be a turning point too.

    Returns:
      [T, B] credit.

    Raises:
      ValueError: an unknown variant.

    Reference: TurningPoint-GRPO, arXiv 2602.06422, eq. 7 and 8.
    """
    rewards = _scores(rewards, groups)
    if variant not in ("constrained", "loose"):
        raise ValueError(f'variant must be "constrained" or "loose", got {variant!r}')
    gains = np.diff(rewards, axis=0)
    to_end, remaining = rewards[-1] - rewards[:-1], rewards[-1] - rewards[1:]
    agrees = np.sign(gains) * np.sign(rewards[-1] - rewards[0])
    agreed_before = np.concatenate([np.full_like(agrees[:1], -1.0 if first_step else 1.0), agrees[:-1]])
    turning = (agreed_before < 0) & (agrees > 0)
    if variant == "constrained":
        turning &= np.sign(gains) * np.sign(remaining) > 0
    if balance:
        turning = _balanced(turning, to_end)
    credit = np.where(turning, to_end, gains)
    return np.where(np.isnan(agrees + agreed_before), np.nan, credit)


def _balanced(turning: np.ndarray, to_end: np.ndarray) -> np.ndarray:
    positive, negative = turning & (to_end > 0), turning & (to_end < 0)
    count = min(positive.sum(), negative.sum())
    kept = np.zeros_like(turning)
    for side in (positive, negative):
        size = np.where(side, np.abs(to_end), -np.inf)
        kept.flat[np.argsort(-size, axis=None, kind="stable")[:count]] = True
    return kept


def coca(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    similarities: np.ndarray,
    window: int = 1,
    weights: Literal["to_go", "share"] = "to_go",
    alpha: float = 0.0,
    std: Literal["group", "global"] = "group",
    eps: float = 1e-4,
    clip: float = 5.0,
) -> np.ndarray:
    """The normalised final reward A, spread over the steps by how much each brings the clean prediction nearer to the result.

    c_i = A (alpha + (1 - alpha) p_i), with p_i = sum_{j >= i} w_j ("to_go", as the authors' code) or T w_i ("share", mean 1), and w of
    `coca_weights`. These are advantages already; the authors normalise them once more (`over="joint"` in `advantages`).

    Args:
      rewards: [T+1, B], of which only the final is read. groups: [B] integer group ids.
      similarities: [T+1, B], see `coca_weights`. window: steps that share one weight.
      weights: "to_go" or "share".
      alpha: in [0, 1], the part of A that all steps get alike.
      std, eps, clip: of the normalisation of the final reward, see `normalize.advantages`.

    Returns:
      [T, B] credit.

    Raises:
      ValueError: wrong shape or option.

    Reference: CoCA, arXiv 2505.19196, ported from DDIM to flow matching.
    """
    rewards = _scores(rewards, groups)
    if weights not in ("to_go", "share"):
        raise ValueError(f'weights must be "to_go" or "share", got {weights!r}')
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    if np.shape(similarities) != rewards.shape:
        raise ValueError(f"similarities must be [T+1, B] = {rewards.shape} like the rewards, got {np.shape(similarities)}")
    scored = ~np.isnan(rewards[-1])
    final = normalize.advantages(rewards[-1:], groups, std=std, eps=eps, clip=clip, valid=scored)  # [1, B]
    share = coca_weights(similarities, window)  # [T, B]
    profile = len(share) * share if weights == "share" else np.cumsum(share[::-1], axis=0)[::-1]
    return np.where(scored, final * (alpha + (1 - alpha) * profile), np.nan)


def coca_weights(similarities: np.ndarray, window: int = 1) -> np.ndarray:
    """The share of each step in the rise of the similarity to the final latent, averaged over windows of steps.

    The rise of window w is its mean similarity minus that of the window before it (for the first: minus similarities[0]). Where the
    whole rise is below `COCA_MIN_RISE`, all steps share alike.

    Args:
      similarities: [T+1, B] cosine between the clean prediction x_t - sigma v at step i and the final latent; [T] is 1.
      window: number of steps in a window; divides T.

    Returns:
      [T, B] weights; they sum to 1 over steps and may be negative.

    Raises:
      ValueError: similarities not [T+1, B] or not finite, or a window that does not divide T.
    """
    similarities = np.asarray(similarities, np.float64)
    if similarities.ndim != 2 or len(similarities) < 2 or not np.isfinite(similarities).all():
        raise ValueError(f"similarities must be finite [T+1, B] with T >= 1, got shape {similarities.shape}")
    steps, batch = len(similarities) - 1, similarities.shape[1]
    if window < 1 or steps % window:
        raise ValueError(f"window must divide the {steps} steps, got {window}; valid: {[w for w in range(1, steps + 1) if steps % w == 0]}")
    means = similarities[1:].reshape(steps // window, window, batch).mean(axis=1)
    rises = np.diff(np.concatenate([similarities[:1], means]), axis=0)  # [T / window, B]
    total = means[-1] - similarities[0]
    steady = total >= COCA_MIN_RISE
    share = np.where(steady, rises / np.where(steady, window * total, 1.0), 1.0 / steps)
    return np.repeat(share, window, axis=0)


class Method(NamedTuple):
    """A credit function and the statistics it was published with; `over` None means that its credits are advantages already."""

    credit: Callable[..., np.ndarray]
    over: Literal["per_step", "joint"] | None


METHODS = {
    "flow_grpo": Method(flow_grpo, "per_step"),
    "dense_grpo": Method(dense_grpo, "per_step"),
    "dense_reward": Method(dense_reward, "per_step"),
    "stepwise": Method(stepwise, "joint"),
    "tp_grpo": Method(tp_grpo, "per_step"),
    "coca": Method(coca, None),
}


class Advantages(NamedTuple):
    """What `advantages` returns, each [T, B].

    Attributes:
      advantage: float64, 0 where masked.
      mask: bool, False where a failed score leaves the step without credit: weight 0 in the policy term.
      credit: float64 before normalisation, NaN where masked.
    """

    advantage: np.ndarray
    mask: np.ndarray
    credit: np.ndarray


def advantages(
    method: str | Callable[..., np.ndarray],
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    over: Literal["per_step", "joint"] | None = None,
    std: Literal["group", "global"] = "group",
    eps: float = 1e-4,
    clip: float = 5.0,
    valid: np.ndarray | None = None,
    **options,
) -> Advantages:
    """Rewards -> advantages: credit, then normalisation, then clipping.

    Args:
      method: a name in `METHODS`, or a function `(rewards, groups, **options) -> credit [T, B]`.
      rewards: [T+1, B] in sampling order. groups: [B] integer group ids.
      over: statistics per step or joint; None takes the method's published choice ("per_step" for a function of yours).
      std, eps, clip: see `normalize.advantages`.
      valid: [B] or [T+1, B] bool, False where a score failed or was not taken; None when all are there.
      **options: the method's own, such as gamma, baseline, variant, similarities.

    Returns:
      `Advantages`.

    Raises:
      ValueError: an unknown method, a wrong shape or option, a valid score that is not finite, or a method that gives no finite credit
        to a trajectory whose scores are all there.
    """
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"unknown credit method {method!r}; known: {', '.join(METHODS)}, or pass a function")
    function, published = METHODS[method] if isinstance(method, str) else Method(method, "per_step")
    rewards = _scores(rewards, groups)
    valid = normalize.broadcast_valid(valid, rewards.shape)
    if not np.isfinite(rewards[valid]).all():
        level, b = np.argwhere(valid & ~np.isfinite(rewards))[0]
        raise ValueError(f"reward of level {level}, trajectory {b} is {rewards[level, b]}; mark failed scores in `valid`")
    if published is None:
        options = {"std": std, "eps": eps, "clip": clip} | options

    credit = np.asarray(function(np.where(valid, rewards, np.nan), groups, **options), np.float64)
    expected = (len(rewards) - 1, rewards.shape[1])
    if credit.shape != expected:
        raise ValueError(f"credit method {method!r} returned shape {credit.shape}, expected [T, B] = {expected}")
    mask = ~np.isnan(credit)
    complete = valid.all(axis=0)
    if options.get("baseline") is not None:
        complete &= ~np.isnan(options["baseline"]).any(axis=0)
    if not mask[:, complete].all():
        raise ValueError(
            f"credit method {method!r} returned NaN for a trajectory whose scores are all valid; "
            "NaN in the rewards marks failed scores and must not spread to other trajectories (np.nanmean)"
        )

    over = over or published
    if over is None:
        advantage = np.clip(np.where(mask, credit, 0.0), -clip, clip)
    else:
        advantage = normalize.advantages(credit, groups, std=std, over=over, eps=eps, clip=clip, valid=mask)
    return Advantages(advantage, mask, credit)


def gain_balance(gains: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    """How gains are spread at each step: what calibration balances and what the report draws.

    Args:
      gains: [T, B], NaN where a score failed. groups: [B] integer group ids.

    Returns:
      Arrays [T]: "positive", "negative", "zero" (shares of the gains that are there; 0 if none is), "std" (within groups, in units of the
      reward: compare it with eps of the normalisation) and "count".

    Raises:
      ValueError: wrong shape or group ids.
    """
    gains, groups = np.asarray(gains, np.float64), np.asarray(groups)
    if gains.ndim != 2:
        raise ValueError(f"gains must be [T, B], got shape {gains.shape}")
    normalize.check_groups(groups, gains.shape[1])
    there = ~np.isnan(gains)
    count = there.sum(axis=1)
    squares = np.zeros(len(gains))
    for group in np.unique(groups):
        for t, chosen in enumerate(there & (groups == group)):
            if chosen.any():
                squares[t] += (normalize.deviations(gains[t, chosen]) ** 2).sum()
    share = 1 / np.maximum(count, 1)
    return {
        "positive": (gains > 0).sum(axis=1) * share,
        "negative": (gains < 0).sum(axis=1) * share,
        "zero": (gains == 0).sum(axis=1) * share,
        "std": np.sqrt(squares * share),
        "count": count,
    }


def _scores(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A copy of the rewards in float64, or ValueError unless they are [T+1, B] with T >= 1 and a group id for each trajectory."""
    rewards = np.array(rewards, np.float64)
    if rewards.ndim != 2 or len(rewards) < 2:
        raise ValueError(f"rewards must be [T+1, B] with T >= 1 (time first), got shape {rewards.shape}")
    normalize.check_groups(np.asarray(groups), rewards.shape[1])
    return rewards
