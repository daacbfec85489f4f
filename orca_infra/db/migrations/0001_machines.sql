-- The stack's identity, the engine's ledger, the machine pools and the functions that workers call.

create table orca.stack_identity (
    single   boolean primary key default true check (single),
    id       text not null check (id ~ '^[a-z][a-z2-7]{15}$'),
    family   text not null,
    made_at  timestamptz not null default now()
);

-- Who writes which transition of a run. docs/reference/run-transitions.md is made from this table.
create table orca.run_transitions (
    from_state  text not null,
    to_state    text not null,
    writer      text not null check (writer in ('scheduler', 'worker', 'driver', 'orca-infra')),
    sense       text not null,
    primary key (from_state, to_state, writer)
);
insert into orca.run_transitions (from_state, to_state, writer, sense) values
    ('queued',  'running',   'worker',     'a worker takes the run; start + 1'),
    ('queued',  'running',   'orca-infra', 'a run cluster is admitted; start + 1'),
    ('queued',  'canceled',  'scheduler',  'a person cancels the run before it started'),
    ('queued',  'failed',    'scheduler',  'the run can never start'),
    ('running', 'succeeded', 'worker',     'the worker ended the run'),
    ('running', 'failed',    'worker',     'the worker ended the run'),
    ('running', 'succeeded', 'driver',     'the driver ended the run'),
    ('running', 'failed',    'driver',     'the driver ended the run'),
    ('running', 'succeeded', 'scheduler',  'the scheduler records the end'),
    ('running', 'failed',    'scheduler',  'the scheduler records the end'),
    ('running', 'canceled',  'scheduler',  'a person cancels the run'),
    ('running', 'queued',    'scheduler',  'the scheduler takes the run back'),
    ('running', 'queued',    'orca-infra', 'its machine was lost, or its start ended without a word'),
    ('running', 'failed',    'orca-infra', 'the same, past the pipeline''s max_starts'),
    ('failed',  'queued',    'scheduler',  'a person runs it again'),
    ('canceled', 'queued',   'scheduler',  'a person runs it again');

create table orca.pool_machines (
    name            text primary key,                -- orca-<pool>-<number>
    pool            text not null,
    number          integer not null check (number > 0),
    provider        text not null,
    type            text not null,
    location        text not null,
    rendered        jsonb not null,                  -- what is declared to the engine, from here and nowhere else
    token_hash      bytea not null,                  -- sha256 of the worker's token; the token is stored nowhere
    created_at      timestamptz not null default now(),
    uid             text,                            -- the provider's id of this very machine
    confirmed_at    timestamptz,
    revoked_at      timestamptz,                     -- from then on its worker can take and end nothing
    removal_reason  text,
    ended_at        timestamptz,
    reason          text,
    unique (pool, number),
    check ((uid is null) = (confirmed_at is null)),
    check ((ended_at is null) = (reason is null)),
    check (ended_at is null or revoked_at is not null)
);
create index pool_machines_live on orca.pool_machines (pool) where ended_at is null;
create index pool_machines_ended on orca.pool_machines (ended_at) where ended_at is not null;

create table orca.pool_status (
    pool           text primary key,
    last_number    integer not null default 0,       -- survives the rows: a number is never used twice
    trying_type    text,                             -- the type it is on; null: the first, not begun
    trying_since   timestamptz,
    tried_at       timestamptz,                      -- the last try, whatever it came to
    last_attempt   text not null default '',         -- what it came to, in words
    demand         integer not null default 0,
    message        text not null default '',         -- why something, or nothing, is made now
    next_try_at    timestamptz,
    observed_at    timestamptz not null default now()
);

create table orca.pool_offers (
    pool      text not null,
    location  text not null,
    type      text not null,
    class     text not null check (class in ('NoCapacity', 'QuotaExceeded', 'Refused', 'AuthFailed', 'Transient')),
    message   text not null,
    since     timestamptz not null default now(),
    last_at   timestamptz not null default now(),
    times     integer not null default 1,
    primary key (pool, location, type)
);

create table orca.owned (
    stack  text not null,
    urn    text not null,
    type   text not null,
    name   text not null,
    id     text not null,
    uid    text not null default '',
    at     timestamptz not null default now(),
    primary key (stack, urn)
);

create table orca.engine_operations (
    id               bigint generated always as identity primary key,
    stack            text not null,
    kind             text not null check (kind in ('up', 'destroy', 'refresh')),
    targets          text[] not null default '{}',
    host             text not null,
    boot_id          text not null,
    pid              integer,
    process_started  double precision,               -- seconds since the boot; with pid and boot it names one process
    started_at       timestamptz not null default now(),
    ended_at         timestamptz,
    outcome          text,
    message          text not null default ''
);
create index engine_operations_open on orca.engine_operations (stack) where ended_at is null or outcome = 'OutcomeUnknown';

-- What an operator has to look at, one sentence a topic; gone once it is no longer so.
create table orca.attention (
    topic    text primary key,
    message  text not null,
    since    timestamptz not null default now()
);

-- Since when the database has been there for workers to be heard in, without a gap; read and moved on by each pass.
create table orca.hearing (
    single   boolean primary key default true check (single),
    since    timestamptz not null default now(),
    read_at  timestamptz not null default now()
);

-- Compare-and-set on state, start and worker; false when the run is no longer as the caller saw it.
create function orca.move_run(
    p_run bigint, p_start integer, p_from text, p_to text, p_writer text, p_worker text, p_reason text
) returns boolean language plpgsql as $$
declare
    moved boolean;
begin
    if not exists (
        select from orca.run_transitions t where t.from_state = p_from and t.to_state = p_to and t.writer = p_writer
    ) then
        raise exception 'run %: % may not write % -> %', p_run, p_writer, p_from, p_to
            using errcode = 'check_violation', hint = 'orca.run_transitions lists who may write what';
    end if;
    perform set_config('orca.writer', p_writer, true);
    update orca.runs r set
        state      = p_to,
        start      = case when p_to = 'running' then r.start + 1 else r.start end,
        worker     = case p_to when 'running' then p_worker when 'queued' then null else r.worker end,
        started_at = case p_to when 'running' then now() when 'queued' then null else r.started_at end,
        ended_at   = case when p_to in ('succeeded', 'failed', 'canceled') then now() end,
        reason     = p_reason
    where r.id = p_run and r.state = p_from and r.start = p_start
      and (p_from <> 'running' or r.worker is not distinct from p_worker);
    moved := found;
    perform set_config('orca.writer', '', true);
    return moved;
end $$;

-- The machine whose token this is; held against revocation until the caller's transaction ends.
create function orca.machine_of(p_worker text, p_token text) returns orca.pool_machines language plpgsql as $$
declare
    machine orca.pool_machines;
begin
    select * into machine from orca.pool_machines m
    where m.name = p_worker and m.token_hash = sha256(convert_to(p_token, 'UTF8'))
      and m.revoked_at is null and m.ended_at is null
    for share;
    if not found then
        raise exception 'the token of worker % is not valid, or was revoked', p_worker
            using errcode = 'invalid_authorization_specification';
    end if;
    return machine;
end $$;

create function orca.worker_hello(p_worker text, p_token text, p_slots integer) returns void language plpgsql as $$
declare
    machine orca.pool_machines := orca.machine_of(p_worker, p_token);
begin
    update orca.workers set seen_at = now(), slots = p_slots where name = p_worker;
    if not found then
        insert into orca.workers (name, pool, slots, first_seen_at, seen_at)
        values (p_worker, machine.pool, p_slots, now(), now());
    end if;
end $$;

create function orca.worker_take(p_worker text, p_token text)
returns table (run_id bigint, start integer, pipeline text) language plpgsql as $$
declare
    machine orca.pool_machines := orca.machine_of(p_worker, p_token);
    candidate record;
begin
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

create function orca.worker_end(
    p_worker text, p_token text, p_run bigint, p_start integer, p_state text, p_reason text
) returns boolean language plpgsql as $$
begin
    perform orca.machine_of(p_worker, p_token);
    return orca.move_run(p_run, p_start, 'running', p_state, 'worker', p_worker, p_reason);
end $$;

-- Revoke a machine's token; what runs there is queued again (or fails, past max_starts). With p_only_idle nothing is done
-- when something runs there: checking and revoking are one transaction, and a worker's take waits for it or is waited for.
-- Returns whether the token is revoked.
create function orca.revoke_machine(p_name text, p_reason text, p_only_idle boolean)
returns boolean language plpgsql as $$
declare
    run record;
begin
    perform from orca.pool_machines m where m.name = p_name and m.ended_at is null for update;
    if not found then
        return false;
    end if;
    if p_only_idle and exists (select from orca.runs r where r.worker = p_name and r.state = 'running') then
        return false;
    end if;
    update orca.pool_machines m
    set revoked_at = coalesce(m.revoked_at, now()), removal_reason = coalesce(m.removal_reason, p_reason)
    where m.name = p_name;
    for run in
        select r.id, r.start, p.max_starts from orca.runs r join orca.pipelines p on p.name = r.pipeline
        where r.worker = p_name and r.state = 'running' for update of r
    loop
        perform orca.move_run(run.id, run.start, 'running', case when run.start >= run.max_starts then 'failed' else 'queued' end,
            'orca-infra', p_name, p_reason);
    end loop;
    return true;
end $$;
