-- That there is a state of the engine, by the stack of the base in it: one that lacks it is not taken for an empty one.

create table orca.state_identity (
    single     boolean primary key default true check (single),
    stack      text not null,
    place      text not null,
    first_seen timestamptz not null default now()
);
