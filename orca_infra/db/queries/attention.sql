-- What an operator has to look at.

-- name: note
insert into orca.attention as a (topic, message) values (%(topic)s, %(message)s)
on conflict (topic) do update set message = excluded.message where a.message <> excluded.message

-- name: clear
delete from orca.attention where topic = %(topic)s

-- name: message
select message from orca.attention where topic = %(topic)s

-- name: all
select topic, message, since from orca.attention order by since
