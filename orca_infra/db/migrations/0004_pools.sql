-- Pauses, drains, refusals told apart by spot, and what pool_status says of a pool besides.

-- What a person paused: nothing is made there, and nothing removed for idleness. The empty name means every pool.
create table orca.pool_pauses (
    pool   text primary key,
    since  timestamptz not null default now()
);

alter table orca.pool_machines
    add column drain_at   timestamptz,                     -- since when it takes no runs and goes once it is idle
    add column drain_now  boolean not null default false;  -- it goes at once, whatever runs there

-- A spot and a lasting machine of one type are two offers.
alter table orca.pool_offers add column spot boolean not null default false;
alter table orca.pool_offers drop constraint pool_offers_pkey;
alter table orca.pool_offers add primary key (pool, location, type, spot);

alter table orca.pool_status
    add column machines      jsonb not null default '{}',  -- how many are making, booting, idle, busy, draining, removing
    add column skipped       text not null default '',     -- types that are left out, with the reason
    add column paused_since  timestamptz;

-- As before, and a machine that is drained takes no more runs.
create or replace function orca.worker_take(p_worker text, p_token text)
returns table (run_id bigint, start integer, pipeline text) language plpgsql as $$
declare
    machine orca.pool_machines := orca.machine_of(p_worker, p_token);
    candidate record;
begin
    if machine.drain_at is not null then
        return;
    end if;
    -- A pipeline is placed on one pool, so one take at a time in a pool keeps every max_runs.
    perform pg_advisory_xact_lock(hashtextextended('orca.worker_take:' || machine.pool, 0));
    if (select count(*) from orca.runs r where r.worker = p_worker and r.state = 'running')
        >= coalesce((select w.slots from orca.workers w where w.name = p_worker), 0) then  -- no hello yet: no slots
        return;
    end if;
    select r.id, r.start, r.pipeline into candidate
    from orca.runs r join orca.pipelines p on p.name = r.pipeline
    where r.state = 'queued' and p.placement = 'worker:' || machine.pool and not p.paused
      and (r.fill or p.max_runs is null or p.max_runs > (
          select count(*) from orca.runs o where o.pipeline = p.name and o.state = 'running' and not o.fill))
    order by r.queued_at, r.id
    limit 1
    for update of r skip locked;
    if found and orca.move_run(candidate.id, candidate.start, 'queued', 'running', 'worker', p_worker, null) then
        return query select candidate.id, candidate.start + 1, candidate.pipeline;
    end if;
end $$;
