/* All calls of provider libraries that are used, one per line, as in calls.h.
 *
 * Every call and library is optional; a missing call is NULL in the table.
 */
OPTIONAL(efa, int, efadv_query_device, (struct ibv_context *context, struct efadv_device_attr *attr, uint32_t inlen))
OPTIONAL(efa, struct ibv_qp *, efadv_create_qp_ex, (struct ibv_context *context, struct ibv_qp_init_attr_ex *attr_ex, struct efadv_qp_init_attr *efa_attr, uint32_t inlen))
OPTIONAL(mlx5, struct ibv_qp *, mlx5dv_create_qp, (struct ibv_context *context, struct ibv_qp_init_attr_ex *qp_attr, struct mlx5dv_qp_init_attr *mlx5_qp_attr))
OPTIONAL(mlx5, struct mlx5dv_qp_ex *, mlx5dv_qp_ex_from_ibv_qp_ex, (struct ibv_qp_ex *qp))
