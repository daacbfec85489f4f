-- Named statements of the machine pools; %(...)s are parameters, and all time is the database's.

-- name: now
select now()

-- name: demand
-- For each pool, the runs that a worker could start: of each pipeline that is not paused, at most max_runs less its running
-- runs (fill runs not counted among them), plus its fill runs.
with placed as (
    select p.name, substr(p.placement, 8) as pool, p.max_runs
    from orca.pipelines p where p.placement like 'worker:%%' and not p.paused
), counted as (
    -- As little as possible for each run, and the times between which a run is young worked out once. One whose clock is
    -- further ahead than that is due: it may never be otherwise.
    select r.pipeline, r.fill, r.queued_at <= (select now() - make_interval(secs => %(grow_after)s))
            or r.queued_at > (select now() + make_interval(secs => %(grow_after)s)) as aged,
        count(*) as runs, min(r.queued_at) as oldest
    from orca.runs r where r.state = 'queued' group by 1, 2, 3
), queued as (
    select c.pipeline,
        coalesce(sum(c.runs) filter (where not c.fill), 0) as plain,
        coalesce(sum(c.runs) filter (where c.fill), 0) as fill,
        coalesce(sum(c.runs) filter (where not c.fill and c.aged), 0) as plain_aged,
        coalesce(sum(c.runs) filter (where c.fill and c.aged), 0) as fill_aged,
        min(c.oldest) filter (where not c.fill and not c.aged) as plain_next,
        min(c.oldest) filter (where c.fill and not c.aged) as fill_next
    from counted c group by c.pipeline
), running as (
    select r.pipeline, count(*) as plain from orca.runs r where r.state = 'running' and not r.fill group by r.pipeline
), startable as (
    select d.pool, q.*,
        case when d.max_runs is not null then greatest(0, d.max_runs - coalesce(n.plain, 0)) end as free
    from placed d join queued q on q.pipeline = d.name left join running n on n.pipeline = d.name
)
select pool,
    sum(least(plain_aged, coalesce(free, plain_aged)) + fill_aged)::int as aged,
    sum(least(plain, coalesce(free, plain)) + fill)::int as waiting,
    min(least(case when least(free, plain) > plain_aged then plain_next end, fill_next))
        + make_interval(secs => %(grow_after)s) as next_due_at
from startable group by pool

-- name: live_machines
-- Every machine whose row has not ended, with what its worker was last seen doing.
select m.name, m.pool, m.number, m.provider, m.type, m.location, m.created_at, m.uid, m.confirmed_at, m.revoked_at,
    m.removal_reason, m.spot, w.first_seen_at, w.seen_at, coalesce(w.slots, 0) as slots,
    coalesce(n.running, 0)::int as running, e.last_run_ended_at, m.drain_at, m.drain_now
from orca.pool_machines m
left join orca.workers w on w.name = m.name
left join lateral (
    select count(*) as running from orca.runs r where r.worker = m.name and r.state = 'running'
) n on true
left join lateral (
    -- What ends only in the future, by a clock that is wrong, would keep a machine for ever.
    select max(r.ended_at) as last_run_ended_at from orca.runs r
    where r.worker = m.name and r.ended_at <= now() + interval '5 minutes'
) e on true
where m.ended_at is null
order by m.pool, m.number

-- name: progress
select pool, last_number, trying_type, trying_since, tried_at, last_attempt from orca.pool_status

-- name: paused
select pool from orca.pool_pauses

-- name: pause
insert into orca.pool_pauses (pool) values (%(pool)s) on conflict do nothing

-- name: resume
-- End the pause of one pool; of all, with each single one, when the pool is empty.
delete from orca.pool_pauses where pool = %(pool)s or %(pool)s = ''

-- name: drain
-- Have a machine go once it is idle, or at once. What is being removed already goes anyway.
update orca.pool_machines set drain_at = coalesce(drain_at, now()), drain_now = drain_now or %(at_once)s
where name = %(name)s and ended_at is null

-- name: refusals
select pool, type, location, spot, class as kind, since, last_at, times from orca.pool_offers order by pool, type, location, spot

-- name: ended_lately
-- Machines whose removal ended a moment ago: a provider's list may still show them.
select name, uid from orca.pool_machines
where ended_at > now() - make_interval(secs => %(seconds)s) and uid is not null

-- name: owned_machines
select stack, name from orca.owned where stack like %(pattern)s

-- name: owned_of_stack
select name, urn, uid from orca.owned where stack = %(stack)s

-- name: machines_named
select name, provider, location, uid, ended_at, extract(epoch from now() - created_at)::float8 as age_seconds
from orca.pool_machines where name = any(%(names)s)

-- name: next_number
-- Take the pool's next number: above every one it ever had and above every one that its provider lists.
insert into orca.pool_status as s (pool, last_number) values (%(pool)s, %(above)s + 1)
on conflict (pool) do update set last_number = greatest(s.last_number, %(above)s) + 1
returning last_number

-- name: record_machine
insert into orca.pool_machines (name, pool, number, provider, type, location, spot, rendered, token_hash)
values (%(name)s, %(pool)s, %(number)s, %(provider)s, %(type)s, %(location)s, %(spot)s, %(rendered)s, %(token_hash)s)

-- name: unrecord_machine
-- Take a row back whose machine nobody was ever asked for, and give its number back.
with taken_back as (
    delete from orca.pool_machines where name = %(name)s and confirmed_at is null and ended_at is null returning pool, number
)
update orca.pool_status s set last_number = s.last_number - 1
from taken_back t where s.pool = t.pool and s.last_number = t.number

-- name: confirm_machine
update orca.pool_machines set uid = %(uid)s, confirmed_at = now()
where name = %(name)s and ended_at is null and confirmed_at is null

-- name: confirm_owned
-- Machines whose `up` ended well and whose confirmation a crash kept from being written: the state holds them as made.
update orca.pool_machines m set uid = o.uid, confirmed_at = now()
from orca.owned o
where o.name = m.name and o.uid <> '' and o.stack = any(%(stacks)s)
    and m.ended_at is null and m.confirmed_at is null and m.revoked_at is null
returning m.name, m.pool

-- name: revoke
select orca.revoke_machine(%(name)s, %(reason)s, %(only_idle)s)

-- name: revoke_unless_worked
select orca.revoke_machine(%(name)s, %(reason)s, %(only_idle)s, %(since)s)

-- name: end_machine
update orca.pool_machines
set ended_at = now(), reason = %(reason)s, revoked_at = coalesce(revoked_at, now())
where name = %(name)s and ended_at is null

-- name: forget_worker
delete from orca.workers where name = %(name)s

-- name: tried
-- What a try came to; the search goes on from `type`, from the first type again when it is null, or (keep) as it was.
insert into orca.pool_status as s (pool, trying_type, trying_since, tried_at, last_attempt)
values (%(pool)s, %(type)s, %(since)s, now(), %(attempt)s)
on conflict (pool) do update set
    trying_type = case when %(keep)s then s.trying_type else excluded.trying_type end,
    trying_since = case when %(keep)s then s.trying_since else excluded.trying_since end,
    tried_at = excluded.tried_at, last_attempt = excluded.last_attempt

-- name: hear
-- Since when workers could be heard without a gap: from now on, after a gap in which nobody read.
insert into orca.hearing as h (single) values (true)
on conflict (single) do update set
    since = case when now() - h.read_at > make_interval(secs => %(gap_seconds)s) then now() else h.since end,
    read_at = now()
returning since

-- name: hearing_since
select since from orca.hearing

-- name: report
insert into orca.pool_status as s (pool, demand, message, next_try_at, skipped, machines, paused_since)
values (%(pool)s, %(demand)s, %(message)s, %(next_try_at)s, %(skipped)s, %(machines)s, (
    select min(p.since) from orca.pool_pauses p where p.pool in (%(pool)s, '')
))
on conflict (pool) do update set demand = excluded.demand, message = excluded.message, next_try_at = excluded.next_try_at,
    skipped = excluded.skipped, machines = excluded.machines, paused_since = excluded.paused_since, observed_at = now(),
    trying_type = case when %(in_search)s then s.trying_type end, trying_since = case when %(in_search)s then s.trying_since end

-- name: refused
-- Remember an offering that could not be had.
insert into orca.pool_offers as o (pool, location, type, spot, class, message)
values (%(pool)s, %(location)s, %(type)s, %(spot)s, %(class)s, %(message)s)
on conflict (pool, location, type, spot) do update set message = excluded.message, last_at = now(),
    since = case when o.class = excluded.class then o.since else now() end,
    times = case when o.class = excluded.class then o.times + 1 else 1 end, class = excluded.class

-- name: forget_refusal
delete from orca.pool_offers
where pool = %(pool)s and location = %(location)s and type = %(type)s and spot = %(spot)s

-- name: prune_machines
delete from orca.pool_machines where ended_at < now() - make_interval(secs => %(kept_seconds)s)

-- name: pools_for_people
select s.*, exists (select from orca.pool_pauses p where p.pool in (s.pool, '')) as paused, (
    select coalesce(jsonb_agg(to_jsonb(o) - 'pool' order by o.type, o.location, o.spot), '[]') from orca.pool_offers o where o.pool = s.pool
) as refused
from orca.pool_status s order by s.pool

-- name: ended_machines
select name, pool, type, location, spot, created_at, ended_at, reason from orca.pool_machines
where ended_at is not null order by ended_at desc limit %(limit)s

-- name: runs_by_state
select state, count(*)::int as count from orca.runs group by state order by state

-- name: runs_of_unknown_pools
-- What waits for pools that no pass has seen: a slip in a placement, most likely.
select substr(p.placement, 8) as pool, count(*)::int as runs
from orca.runs r join orca.pipelines p on p.name = r.pipeline
where r.state = 'queued' and p.placement like 'worker:%%' and not p.paused
    and not exists (select from orca.pool_status s where s.pool = substr(p.placement, 8))
group by 1 order by 2 desc, 1 limit %(limit)s

-- name: remember_account
insert into orca.cloud_identity (provider, account) values (%(provider)s, %(account)s) on conflict do nothing

-- name: known_account
select account, first_seen from orca.cloud_identity where provider = %(provider)s

-- name: declared_machines
-- The machines that are confirmed and wanted, as they were rendered at their birth.
select name, pool, provider, rendered from orca.pool_machines
where ended_at is null and confirmed_at is not null and revoked_at is null order by name
