-- What an operator has to look at.

-- name: note
insert into orca.attention as a (topic, message) values (%(topic)s, %(message)s)
on conflict (topic) do update set message = excluded.message where a.message <> excluded.message

-- name: clear
delete from orca.attention where topic = %(topic)s

-- name: clear_outdated
-- What only a loop with other settings said: of scopes that this one has not, and of drift that is put right now.
delete from orca.attention where topic = any(%(topics)s)
    or (not %(drift_is_reported)s and (starts_with(topic, 'drift ') or starts_with(topic, 'labels of ')))

-- name: clear_drift
-- What was said of machine stacks that have nothing any more.
delete from orca.attention where starts_with(topic, 'drift ') and not substr(topic, 7) = any(%(stacks)s)

-- name: message
select message from orca.attention where topic = %(topic)s

-- name: all
select topic, message, since from orca.attention order by since
