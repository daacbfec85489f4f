-- Launches: what a claim and its end do are functions, whose plans a connection makes once and not at every launch, also
-- behind a pooler. A key then costs no more ways to the server than none.

-- A runtime's row with its Pod's. `ended`: why it is ending or has ended.
create type orca.runtime_claim as (
    id            uuid,
    pod           text,
    namespace     text,
    uid           text,
    address       text,
    warm          boolean,
    environment   text,
    expires_at    timestamptz,
    secret_made   boolean,
    ended         text,
    ended_detail  text
);

create function orca.runtime_of_key(p_user text, p_key text)
returns setof orca.runtime_claim stable language plpgsql as $$
begin
    return query
    select r.id, r.pod, p.namespace, p.uid, p.address, r.warm, r.environment, r.expires_at,
        r.secret_made_at is not null, coalesce(r.reason, p.ending_reason), p.ending_detail
    from orca.runtimes r join orca.runtime_pods p on p.name = r.pod
    where r.user_name = p_user and r.idempotency_key = p_key;
end $$;

create function orca.claim_runtime(
    p_environment text, p_namespace text, p_user text, p_key text, p_pool text, p_requests jsonb, p_placement jsonb
) returns setof orca.runtime_claim language plpgsql
-- Always by the index that has Pods in the order of launches: a plan of a small pool's day would read and sort a large one.
set enable_sort = off as $$
begin
    if p_key is not null then
        -- Two requests with one key go one after the other.
        perform pg_advisory_xact_lock(hashtextextended('orca.launch:' || p_user || ':' || p_key, 0));
        return query select * from orca.runtime_of_key(p_user, p_key);
        if found then
            return;
        end if;
    end if;
    -- What another launch holds is passed over, what it took is seen as taken.
    return query
    with pick as (
        select p.name from orca.runtime_pods p
        where p.environment = p_environment and p.namespace = p_namespace and p.ready_at is not null
          and p.taken_at is null and p.ending_reason is null and p.ended_at is null
          and (p_pool is null or p.pool = p_pool)
          and (p_placement is null or p.placement = p_placement)
          and not exists (
              select from jsonb_each_text(p_requests) asked
              where coalesce((p.requests ->> asked.key)::numeric, 0) < asked.value::numeric)
        order by p.size, p.burning_rate, p.created_at, p.name
        limit 1 for update skip locked
    ), taken as (
        update orca.runtime_pods p set taken_at = now() from pick where p.name = pick.name returning p.*
    ), made as (
        insert into orca.runtimes (pod, user_name, environment, warm, idempotency_key, burning_rate, expires_at)
        select t.name, p_user, t.environment, true, p_key, t.burning_rate, now() + make_interval(secs => t.cull_seconds)
        from taken t returning *
    )
    select m.id, t.name, t.namespace, t.uid, t.address, true, t.environment, m.expires_at, false, null::text, ''
    from taken t join made m on m.pod = t.name;
end $$;

create function orca.runtime_given(p_id uuid) returns boolean language plpgsql as $$
begin
    update orca.runtimes r set secret_made_at = coalesce(r.secret_made_at, now()) from orca.runtime_pods p
    where r.id = p_id and r.ended_at is null and p.name = r.pod and p.ended_at is null and p.ending_reason is null;
    return found;
end $$;
