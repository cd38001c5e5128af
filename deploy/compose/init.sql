-- Run once by the postgres image, as superuser: an ordinary role that owns its
-- database and may read the log.
CREATE ROLE lab LOGIN REPLICATION PASSWORD 'lab';
CREATE DATABASE lab OWNER lab;
