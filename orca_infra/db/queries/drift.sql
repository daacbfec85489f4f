-- Named statements of what was changed by hand; %(...)s are parameters.

-- name: stacks
-- Machine stacks that own something, and whether their turn has come since they were last looked at. Each has its own instant
-- within the period, by its name, so that not all of them are looked at together.
with stacks as (
    select o.stack, min(o.at) as since, mod(abs(hashtext(o.stack)::bigint), ceil(%(period_seconds)s)::bigint) as phase
    from orca.owned o where starts_with(o.stack, %(prefix)s) group by o.stack
), looked as (
    select e.stack, max(e.started_at) as at from orca.engine_operations e where e.kind = 'refresh' group by e.stack
)
select s.stack,
    floor((extract(epoch from now()) + s.phase) / %(period_seconds)s)
        > floor((extract(epoch from coalesce(l.at, s.since)) + s.phase) / %(period_seconds)s) as due
from stacks s left join looked l using (stack)
order by coalesce(l.at, s.since)
