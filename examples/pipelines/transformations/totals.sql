CREATE MATERIALIZED VIEW totals AS
SELECT account, count(*) AS payments, sum(amount) AS amount FROM payments GROUP BY account;
