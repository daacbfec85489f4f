-- The lead: its epoch, which fences writes of whoever led before, and on which history of the database it was taken.

create table orca.lead (
    single             boolean primary key default true check (single),
    epoch              bigint not null,
    holder             text not null,
    since              timestamptz not null,
    system_identifier  text,
    timeline           integer,
    strays_held_since  timestamptz,
    strays_held_why    text not null default ''
);

-- Whose data this is and how often a copy of it took over; null where the server or its owner does not say.
create function orca.server_history(out system_identifier text, out timeline integer) language plpgsql as $$
begin
    begin
        select s.system_identifier::text into system_identifier from pg_control_system() s;
    exception when insufficient_privilege or undefined_function or feature_not_supported then null;
    end;
    begin
        -- At once after a failover; pg_control_checkpoint() says it only after the next checkpoint.
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer;
    exception when insufficient_privilege or undefined_function or feature_not_supported
        or object_not_in_prerequisite_state then null;
    end;
end $$;

-- A new epoch begins. Waits for the transactions of earlier leaders that are under way, since later ones will be refused.
create function orca.begin_lead(p_holder text) returns bigint language plpgsql as $$
declare
    before orca.lead;
    history record;
    lost text := '';
begin
    perform pg_advisory_xact_lock(hashtextextended('orca.epoch', 0));
    select * into before from orca.lead;
    select * into history from orca.server_history();
    if before.system_identifier <> history.system_identifier then
        lost := format('the database is another server''s copy (system identifier %s, before %s)',
                       history.system_identifier, before.system_identifier);
    elsif before.timeline <> history.timeline then
        lost := format('the database failed over or was restored (timeline %s, before %s)', history.timeline, before.timeline);
    end if;
    insert into orca.lead as l (epoch, holder, since, system_identifier, timeline, strays_held_since, strays_held_why)
    values (1, p_holder, now(), history.system_identifier, history.timeline, null, '')
    on conflict (single) do update set
        epoch = l.epoch + 1,
        holder = excluded.holder,
        since = excluded.since,
        system_identifier = coalesce(excluded.system_identifier, l.system_identifier),
        timeline = coalesce(excluded.timeline, l.timeline),
        strays_held_since = case when lost <> '' then now() else l.strays_held_since end,
        strays_held_why = case when lost <> '' then lost else l.strays_held_why end;
    return (select epoch from orca.lead);
end $$;

-- Whether this epoch is the last and its lock is held by that server process; it stays so until the transaction ends.
create function orca.leads(p_epoch bigint, p_pid integer) returns boolean language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(hashtextextended('orca.epoch', 0));
    return exists (select from orca.lead where epoch = p_epoch) and exists (
        -- A bigint key stands in pg_locks as two halves, with objsubid 1.
        select from pg_locks l
        where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.pid = p_pid
          and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('orca.leader', 0));
end $$;

-- When an operation is over for certain, wherever its engine ran.
alter table orca.engine_operations add column deadline_seconds double precision;

-- A state that the engine refuses keeps its stack from being worked on, as an end that is not known does.
drop index orca.engine_operations_open;
create index engine_operations_open on orca.engine_operations (stack)
    where ended_at is null or outcome in ('OutcomeUnknown', 'StateBroken');
