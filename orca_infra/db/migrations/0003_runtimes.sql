-- Runtimes: a launch finds its Pod by an index alone, and what runtimes cost is kept and can be asked at any time.

-- In the order in which launches take Pods, so that a claim reads the first that fits and none beside it.
create index runtime_pods_next on orca.runtime_pods (environment, namespace, size, burning_rate, created_at, name)
    where ready_at is not null and taken_at is null and ending_reason is null and ended_at is null;
drop index orca.runtime_pods_warm;
-- What the backoff of replacements counts, and what is deleted after its time.
create index runtime_pods_ended on orca.runtime_pods (ended_at) where ended_at is not null;
create index runtimes_ended on orca.runtimes (ended_at) where ended_at is not null;

-- The seconds that a runtime burns credits: since it can be used, until its end began, and never past its time.
create function orca.runtime_seconds(
    assigned_at timestamptz, ready_at timestamptz, until_at timestamptz, expires_at timestamptz
) returns double precision immutable language sql return
    case when ready_at is null then 0 else greatest(0, extract(epoch from
        least(until_at, coalesce(expires_at, until_at)) - greatest(assigned_at, ready_at)))::double precision end;

-- What a runtime has cost in the end. Its rows in runtimes and runtime_pods go after a while; this one stays.
create table orca.runtime_usage (
    runtime       uuid primary key,
    user_name     text not null,
    environment   text not null,
    pool          text,                              -- null: a cold start
    warm          boolean not null,
    assigned_at   timestamptz not null,
    ended_at      timestamptz not null,              -- when its end began
    seconds       double precision not null check (seconds >= 0),
    burning_rate  double precision not null,
    credits       double precision not null,
    reason        text not null
);
create index runtime_usage_of_user on orca.runtime_usage (user_name, ended_at);
insert into orca.runtime_usage
select r.id, r.user_name, r.environment, p.pool, r.warm, r.assigned_at, r.ended_at,
    case when r.burning_rate > 0 then coalesce(r.credits, 0) / r.burning_rate
        else orca.runtime_seconds(r.assigned_at, p.ready_at, r.ended_at, r.expires_at) end,
    r.burning_rate, coalesce(r.credits, 0), r.reason
from orca.runtimes r join orca.runtime_pods p on p.name = r.pod where r.ended_at is not null;
