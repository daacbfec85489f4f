-- What each pass that changed something saw and decided; `orca-infra explain` reads it.

create table orca.passes (
    id          bigint generated always as identity primary key,
    scope       text not null check (scope in ('machines', 'runs', 'runtimes')),
    decided_at  timestamptz not null,                -- the snapshot's instant
    ended_at    timestamptz,                         -- null: under way, or cut short
    outcome     text,                                -- Done, or the kind of the error that ended it
    message     text not null default '',            -- the error's
    changed     integer not null default 0,          -- how many actions changed something
    version     text not null,                       -- of the program
    about       text[] not null,                     -- the pools, machines, objects, Pods and runs that it decided about
    decisions   jsonb not null,                      -- [{"about": [], "decided": "", "why": "", "acts": true}]
    record      bytea not null,                      -- zlib of JSON: snapshot, limits, plan
    check ((ended_at is null) = (outcome is null))
);
create index passes_of_scope on orca.passes (scope, id);
create index passes_about on orca.passes using gin (about);
-- It is compressed already.
alter table orca.passes alter column record set storage external;
