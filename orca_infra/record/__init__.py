"""What each pass saw, decided and came to, kept in Postgres, and read again to say why."""
