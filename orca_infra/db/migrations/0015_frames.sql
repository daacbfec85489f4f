-- What of a pass is as it was in an earlier one is kept once, so that a pass costs what has changed and not what there is.

create table orca.pass_frames (
    id      bigint generated always as identity primary key,
    scope   text not null check (scope in ('machines', 'runs', 'runtimes')),
    record  bytea not null                           -- as in orca.passes, of a whole pass
);
create index pass_frames_of_scope on orca.pass_frames (scope, id);
alter table orca.pass_frames alter column record set storage external;

-- null: the record is of a whole pass.
alter table orca.passes add column frame bigint references orca.pass_frames;
create index passes_of_frame on orca.passes (frame);
