"""What worker machines cost an hour, where the types of orca.toml carry `price_per_hour`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orca_infra.machines.model import Limits, MachineRow, Make, Plan, Pool, Remove
from orca_infra.preview.model import Price

_Key = tuple[str, str]


def prices_of(pools: Iterable[Pool]) -> dict[_Key, float | None]:
    """By pool and type; of two entries of one type, the dearest, and none where one has none."""
    prices: dict[_Key, float | None] = {}
    for pool in pools:
        for kind in pool.types:
            known = prices.get((pool.name, kind.type), 0.0)
            unknown = known is None or kind.price_per_hour is None
            prices[pool.name, kind.type] = None if unknown else max(known or 0.0, kind.price_per_hour or 0.0)
    return prices


def price_now(machines: Iterable[MachineRow], pools: Iterable[Pool]) -> Price:
    """What exists."""
    prices = prices_of(pools)
    return _sum(prices.get((row.pool, row.type)) for row in machines)


def price_after(machines: Iterable[MachineRow], plan: Plan, pools: Sequence[Pool]) -> Price:
    """What exists after the plan; of what is made the first type that is tried counts."""
    leaving = {action.name for action in plan.actions if isinstance(action, Remove)}
    kept = [row for row in machines if row.name not in leaving]
    prices = prices_of(pools)
    of_kept = [prices.get((row.pool, row.type)) for row in kept]
    of_made = [
        prices.get((action.pool, action.candidates[0].type))
        for action in plan.actions
        if isinstance(action, Make)
        for _ in range(action.count)
    ]
    return _sum([*of_kept, *of_made])


def price_at_most(pools: Sequence[Pool], limits: Limits | None, most_machines: int | None) -> Price:
    """What there could be at most: each pool full of the dearest type that it may have, the dearest pools first.

    Args:
        pools: as orca.toml has them.
        limits: whose `allowed` restrains types and counts; None: nothing does.
        most_machines: max_machines_total; None: no such limit.

    """
    places: list[tuple[float, bool]] = []
    allowed = limits.allowed if limits else None
    for pool in pools:
        count = pool.max_machines
        kinds = pool.types
        if allowed is not None:
            count = count if allowed.machines_per_pool is None else min(count, allowed.machines_per_pool)
            kinds = tuple(
                k for k in kinds if allowed.has_type(k.type) and any(allowed.has_location(p) for p in k.locations)
            )
            kinds = kinds if allowed.has_image(pool.image) else ()
        if not kinds:
            continue
        stated = [kind.price_per_hour for kind in kinds if kind.price_per_hour is not None]
        # Where one type has no price, the most is not known; what is known of it is said.
        places += [(max(stated, default=0.0), len(stated) == len(kinds))] * count
    totals = [most for most in (most_machines, allowed.machines if allowed else None) if most is not None]
    places.sort(reverse=True)
    taken = places[: min(totals)] if totals else places
    return _price(sum(price for price, _ in taken), sum(not whole for _, whole in taken))


def _sum(prices: Iterable[float | None]) -> Price:
    listed = list(prices)
    return _price(sum(p for p in listed if p is not None), sum(p is None for p in listed))


def _price(per_hour: float, unpriced: int) -> Price:
    """Rounded: 0.1 + 0.2 is 0.3 to people."""
    return Price(per_hour=round(per_hour, 6), unpriced=unpriced)
