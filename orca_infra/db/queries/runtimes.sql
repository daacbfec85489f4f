-- Named statements of the runtime pools; %(...)s are parameters.

-- name: live_pods
-- Pods that have not ended, each with what it is taken for. `uid`: seen, or confirmed by the cohort that made it. `tried_at`:
-- when a cohort first declared it, unless it is known that nothing came of it.
select p.name, p.namespace, p.pool, p.environment, p.created_at, coalesce(p.uid, o.uid) as uid, p.uid is not null as seen,
    p.ready_at, p.unready_at, p.address, p.problem, p.taken_at, coalesce(o.refused, '') as refused,
    p.ending_reason, p.ending_detail,
    o.declared_at as tried_at,
    r.id as runtime, r.expires_at, r.secret_made_at is not null as secret_made
from orca.runtime_pods p
left join orca.kube_objects o on o.pod = p.name and o.kind = 'Pod'
left join orca.runtimes r on r.pod = p.name and r.ended_at is null
where p.ended_at is null
order by p.created_at, p.name

-- name: for_people
-- What there is of each pool; `pool` is null for cold starts. `problem`: one of those that keep a Pod from being Ready.
select namespace, pool, count(*) filter (where ready_at is not null and taken_at is null) as warm,
    count(*) filter (where taken_at is not null) as assigned,
    count(*) filter (where ready_at is null and taken_at is null) as starting,
    coalesce(max(problem) filter (where ready_at is null), '') as problem
from orca.runtime_pods where ended_at is null and ending_reason is null
group by namespace, pool order by namespace, pool

-- name: being_made
-- Pods whose `up` is under way.
select o.pod from orca.kube_objects o join orca.cohorts c on c.stack = o.cohort
where o.scope = 'runtimes' and o.uid is null and c.ended_at is null

-- name: is_family_paused
select exists (select from orca.pool_pauses where pool = '*')

-- name: recent_failures
-- What the backoff of replacements counts from: waiting Pods of the last hour that could not become Ready.
select pool, count(*)::int as failures, max(ended_at) as last_at from orca.runtime_pods
where pool is not null and taken_at is null and ended_at > now() - interval '1 hour' and reason = any(%(reasons)s)
group by pool

-- name: skip_numbers
-- A database from a backup counts from an earlier number: those that the cluster shows are not used again.
select setval('orca.runtime_numbers', %(seen)s) from orca.runtime_numbers n
where %(seen)s::bigint > n.last_value or (%(seen)s::bigint = n.last_value and not n.is_called)

-- name: next_numbers
select nextval('orca.runtime_numbers')::bigint as number from generate_series(1, %(count)s)

-- name: record_pods
-- Pods that are to be made, each with the object that a cohort declares.
with pods as (
    select * from jsonb_to_recordset(%(pods)s) as p (
        name text, namespace text, pool text, environment text, requests jsonb, size double precision[], placement jsonb,
        burning_rate double precision, cull_seconds double precision, manifest jsonb)
), recorded as (
    insert into orca.runtime_pods
        (name, namespace, pool, environment, requests, size, placement, burning_rate, cull_seconds, taken_at)
    select name, namespace, pool, environment, requests, size, placement, burning_rate, cull_seconds,
        case when %(taken)s then now() end
    from pods
)
insert into orca.kube_objects (scope, namespace, kind, name, pod, rendered)
select 'runtimes', namespace, 'Pod', name, name, manifest from pods

-- name: lock_pods
-- Before several are written, in one order. Launches pass over those that are locked, and wait for none.
select from orca.runtime_pods where name = any(%(names)s) order by name for no key update

-- name: mark_pods
-- What the cluster shows of Pods. One that is taken stays noted as Ready; another uid is another Pod.
update orca.runtime_pods p set
    uid = coalesce(p.uid, m.uid), address = coalesce(m.address, p.address), problem = m.problem,
    unready_at = case when not m.ready and p.ready_at is not null and p.taken_at is null then now() else p.unready_at end,
    ready_at = case when m.ready then coalesce(p.ready_at, now()) when p.taken_at is null then null else p.ready_at end
from jsonb_to_recordset(%(marks)s) as m (namespace text, name text, uid text, ready boolean, address text, problem text)
where p.namespace = m.namespace and p.name = m.name and p.ended_at is null and p.ending_reason is null
  and (p.uid is null or m.uid is null or p.uid = m.uid)
  and (p.problem <> m.problem or (p.ready_at is not null) <> m.ready or (p.uid is null and m.uid is not null)
    or p.address is distinct from coalesce(m.address, p.address))

-- name: begin_ending
-- A Pod that is to end because it waits is left alone when a launch has just taken it: claims write `taken_at` too.
update orca.runtime_pods set ending_reason = %(reason)s, ending_detail = %(detail)s, ending_at = now()
where name = %(name)s and ended_at is null and ending_reason is null and (not %(only_waiting)s or taken_at is null)

-- name: is_ending
select ending_reason is not null from orca.runtime_pods where name = %(name)s

-- name: end_runtime
-- Its credits: since it could be used, up to when its end began, and never past its time. Only once its end began.
with ended as (
    update orca.runtimes r set ended_at = p.ending_at, reason = p.ending_reason,
        credits = r.burning_rate * orca.runtime_seconds(r.assigned_at, p.ready_at, p.ending_at, r.expires_at)
    from orca.runtime_pods p
    where r.pod = %(name)s and p.name = r.pod and r.ended_at is null and p.ending_reason is not null
    returning r.*, p.pool, p.ready_at
)
insert into orca.runtime_usage
select id, user_name, environment, pool, warm, assigned_at, ended_at,
    orca.runtime_seconds(assigned_at, ready_at, ended_at, expires_at), burning_rate, credits, reason from ended
on conflict (runtime) do nothing

-- name: end_pod
update orca.runtime_pods set ended_at = now(), reason = ending_reason
where name = %(name)s and ended_at is null and ending_reason is not null
returning reason

-- name: forget_objects
delete from orca.kube_objects where pod = %(name)s

-- name: lock_key
-- Two requests with one key go one after the other.
select pg_advisory_xact_lock(hashtextextended('orca.launch:' || %(user)s || ':' || %(key)s, 0))

-- name: by_key
select * from orca.runtime_of_key(%(user)s, %(key)s)

-- name: is_as_asked
-- Whether the Pod of a runtime is what a launch asks for, by the rules of claims. A cold start's has no pool.
select (%(pool)s::text is null or p.pool is null or p.pool = %(pool)s)
  and (%(placement)s::jsonb is null or p.placement = %(placement)s::jsonb)
  and not exists (
      select from jsonb_each_text(%(requests)s) asked
      where coalesce((p.requests ->> asked.key)::numeric, 0) < asked.value::numeric)
from orca.runtime_pods p where p.name = %(pod)s

-- name: claim
-- The runtime of the key, else the smallest warm Pod that fits, exactly once.
select * from orca.claim_runtime(%(environment)s, %(namespace)s, %(user)s, %(key)s, %(pool)s, %(requests)s, %(placement)s)

-- name: record_runtime
-- Of a cold start, in the transaction that records its Pod.
insert into orca.runtimes (pod, user_name, environment, warm, idempotency_key, burning_rate, expires_at)
select p.name, %(user)s, p.environment, false, %(key)s, p.burning_rate, now() + make_interval(secs => p.cull_seconds)
from orca.runtime_pods p where p.name = %(name)s
returning id, pod, %(namespace)s as namespace, null::text as uid, null::text as address, false as warm, environment,
    expires_at, false as secret_made, null::text as ended, '' as ended_detail

-- name: wake_loop
-- Its next pass makes the Pod: nothing on the cluster tells it of a cold start.
select pg_notify('orca_demand', 'runtimes')

-- name: secret_made
-- Not for a runtime whose Pod is ending already: its launch goes on to the next. Else what the launch says of it.
select cost.* from orca.runtime_given(%(id)s) as given, orca.runtime_cost(%(id)s) as cost where given

-- name: cost
select * from orca.runtime_cost(%(id)s)

-- name: discard_runtime
-- The Pod died before anybody got it: nobody burns credits for it, and the launch's key is free for the next Pod.
with discarded as (delete from orca.runtimes where id = %(id)s and secret_made_at is null returning pod)
update orca.runtime_pods p set ending_reason = %(reason)s, ending_detail = %(detail)s, ending_at = now()
from discarded d where p.name = d.pod and p.ended_at is null and p.ending_reason is null

-- name: release_runtime
-- Nothing was given to the Pod: it waits again.
with released as (delete from orca.runtimes where id = %(id)s and secret_made_at is null returning pod)
update orca.runtime_pods p set taken_at = null from released d where p.name = d.pod and p.ended_at is null

-- name: pod_of_runtime
select p.name, p.namespace, p.uid from orca.runtimes r join orca.runtime_pods p on p.name = r.pod
where r.id = %(id)s and r.ended_at is null

-- name: runtimes
-- One by its id, or all that have not ended, of one user or of everybody; each with what it has cost up to now.
select r.id, r.pod, p.namespace, p.pool, r.user_name as user, r.environment, r.warm, r.burning_rate, r.assigned_at,
    r.expires_at, p.ready_at, p.address, p.problem, coalesce(o.refused, '') as refused, p.ending_reason, p.ending_detail,
    r.ended_at, coalesce(r.credits, r.burning_rate
        * orca.runtime_seconds(r.assigned_at, p.ready_at, coalesce(p.ending_at, now()), r.expires_at)) as credits
from orca.runtimes r join orca.runtime_pods p on p.name = r.pod
left join orca.kube_objects o on o.pod = p.name and o.kind = 'Pod'
where case when %(id)s::uuid is null then r.ended_at is null else r.id = %(id)s end
  and (%(user)s::text is null or r.user_name = %(user)s)
order by r.assigned_at, r.id

-- name: ids_beginning
-- Those that live, and with `ended` the others that are still kept. Two are enough to see that it is not one.
select id from orca.runtimes where id::text like %(beginning)s and (%(ended)s or ended_at is null) order by id limit 2

-- name: extend_runtime
-- At least so long from now on; never sooner than before. Not one whose time is over, though no loop has seen that yet.
update orca.runtimes r set expires_at = greatest(r.expires_at, now() + make_interval(secs =>
    case when %(within_cull)s then least(%(seconds)s, p.cull_seconds) else %(seconds)s end))
from orca.runtime_pods p
where r.id = %(id)s and r.ended_at is null and p.name = r.pod and p.ending_reason is null and r.expires_at > now()

-- name: usage
-- What a user's runtimes have cost: those that have ended exactly, those that run up to now. The newest first.
select runtime, user_name as user, environment, pool, warm, assigned_at, ended_at, seconds, burning_rate, credits, reason
from orca.runtime_usage where user_name = %(user)s
union all
select l.id, l.user_name, l.environment, l.pool, l.warm, l.assigned_at, null, l.seconds, l.burning_rate,
    l.burning_rate * l.seconds, coalesce(l.ending_reason, '')
from (
    select r.*, p.pool, p.ending_reason,
        orca.runtime_seconds(r.assigned_at, p.ready_at, coalesce(p.ending_at, now()), r.expires_at) as seconds
    from orca.runtimes r join orca.runtime_pods p on p.name = r.pod
    where r.user_name = %(user)s and r.ended_at is null
) l
order by assigned_at desc, runtime

-- name: prune_runtimes
delete from orca.runtimes where ended_at < now() - make_interval(secs => %(kept_seconds)s)

-- name: prune_pods
delete from orca.runtime_pods p where p.ended_at < now() - make_interval(secs => %(kept_seconds)s)
  and not exists (select from orca.runtimes r where r.pod = p.name)
