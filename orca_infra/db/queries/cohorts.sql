-- Named statements of the cohorts; %(...)s are parameters.

-- name: cluster_identity
insert into orca.cluster_identity (uid, server) values (%(uid)s, %(server)s) on conflict do nothing

-- name: cluster_known
select uid, server from orca.cluster_identity

-- name: open_objects
-- What is still to be made, of rows that live, and is not being made; whole runs. What somebody waits for comes first, then
-- what was refused the fewest times (or what is refused again and again would keep all else from being made), then the oldest.
with open as (
    select o.run, o.start, o.pod, bool_or(o.next_try_at is null or o.next_try_at <= now()) as due, max(o.tries) as tries
    from orca.kube_objects o where o.scope = %(scope)s and o.uid is null
      and not exists (select from orca.cohorts k where k.stack = o.cohort and k.ended_at is null)
    group by o.run, o.start, o.pod
), chosen as (
    select n.*, coalesce(c.created_at, p.created_at) as owner_created_at
    from open n
    left join orca.run_clusters c on c.run = n.run and c.start = n.start
    left join orca.runtime_pods p on p.name = n.pod
    where n.due and coalesce(c.ended_at, p.ended_at) is null and coalesce(c.ending_reason, p.ending_reason) is null
      and (p.taken_at is not null or not %(only_awaited)s)
    order by p.taken_at, n.tries, coalesce(c.created_at, p.created_at) limit %(limit)s
)
select o.namespace, o.kind, o.name, o.rendered, o.run, o.start, o.pod, j.uid as job_uid
from chosen d
join orca.kube_objects o on o.scope = %(scope)s and o.uid is null and coalesce(o.run, -1) = coalesce(d.run, -1)
    and coalesce(o.start, -1) = coalesce(d.start, -1) and coalesce(o.pod, '') = coalesce(d.pod, '')
left join orca.kube_objects j on j.run is not null and j.run = o.run and j.start = o.start and j.position = 0 and o.position > 0
order by d.owner_created_at, o.run, o.position

-- name: begin_cohort
with n as (select nextval('orca.cohort_numbers') as number)
insert into orca.cohorts (stack, number, scope) select %(prefix)s || number, number, %(scope)s from n returning stack

-- name: put_in_cohort
update orca.kube_objects set cohort = %(stack)s, declared_at = coalesce(declared_at, now())
where (namespace, kind, name) in (select * from unnest(%(namespaces)s::text[], %(kinds)s::text[], %(names)s::text[]))

-- name: confirm_objects
update orca.kube_objects o set uid = m.uid, confirmed_at = now(), refused = ''
from unnest(%(namespaces)s::text[], %(kinds)s::text[], %(names)s::text[], %(uids)s::text[]) as m (namespace, kind, name, uid)
where o.namespace = m.namespace and o.kind = m.kind and o.name = m.name and o.uid is null

-- name: refuse_object
-- Tried again after 5 s, doubling to 60.
update orca.kube_objects
set refused = %(message)s, declared_at = case when %(absent)s then null else declared_at end, tries = tries + 1,
    next_try_at = now() + make_interval(secs => least(60, 5 * 2 ^ least(tries, 4)))
where namespace = %(namespace)s and kind = %(kind)s and name = %(name)s and uid is null

-- name: next_try
select extract(epoch from min(next_try_at) - now()) from orca.kube_objects
where scope = %(scope)s and uid is null and next_try_at > now()

-- name: nothing_made
-- The engine could not begin: what this cohort was the first to declare is not there.
update orca.kube_objects o set declared_at = null from orca.cohorts c
where c.stack = %(stack)s and o.cohort = c.stack and o.uid is null and o.declared_at >= c.begun_at

-- name: end_cohort
update orca.cohorts set ended_at = now(), outcome = %(outcome)s where stack = %(stack)s

-- name: abandon_cohorts
-- Cohorts whose up was cut short, which are all but those that the asking process has under way: what they left goes with the next.
update orca.cohorts set ended_at = now(), outcome = 'OutcomeUnknown'
where ended_at is null and scope = %(scope)s and stack <> all(%(under_way)s::text[])

-- name: empty_cohorts
-- Cohorts that declare nothing any more; not those whose state nobody can read.
select c.stack from orca.cohorts c
where c.scope = %(scope)s and c.ended_at is not null and c.outcome is distinct from 'StateBroken'
  and not exists (select from orca.kube_objects o where o.cohort = c.stack)
order by c.number limit %(limit)s

-- name: forget_cohort
delete from orca.cohorts where stack = %(stack)s
