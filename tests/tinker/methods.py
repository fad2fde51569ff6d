"""The public methods of the SDK's clients, and the routes that they need. Prints docs/tinker.md's table."""

from treadle.tinker.app import ROUTES, UNSUPPORTED

POST, GET, PUT, DELETE = "POST", "GET", "PUT", "DELETE"
_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
METHODS: dict[str, dict[str, tuple[str, str] | None]] = {  # None: asks no server
    "ServiceClient": {
        "create_lora_training_client": (POST, "/create_model"),
        "create_training_client_from_state": (POST, "/load_weights"),
        "create_training_client_from_state_with_optimizer": (POST, "/load_weights"),
        "create_sampling_client": (POST, "/create_sampling_session"),
        "create_rest_client": None,
        "get_server_capabilities": (GET, "/get_server_capabilities"),
        "close": (POST, "/sessions/{session}/finish"),
        "create_custom_loss": (POST, "/create_custom_loss"),
        "copy_weights": (POST, "/copy_weights"),
    },
    "TrainingClient": {
        "forward": (POST, "/forward_backward"),
        "forward_backward": (POST, "/forward_backward"),
        "forward_backward_custom": (POST, "/forward_backward"),
        "optim_step": (POST, "/optim_step"),
        "save_state": (POST, "/save_weights"),
        "load_state": (POST, "/load_weights"),
        "load_state_with_optimizer": (POST, "/load_weights"),
        "save_weights_for_sampler": (POST, "/save_weights_for_sampler"),
        "save_weights_and_get_sampling_client": (POST, "/save_weights_for_sampler"),
        "create_sampling_client": (POST, "/create_sampling_session"),
        "get_info": (POST, "/get_info"),
        "get_tokenizer": None,
        "save_weights_external": (POST, "/save_weights_external"),
    },
    "SamplingClient": {
        "sample": (POST, "/asample"),
        "compute_logprobs": (POST, "/asample"),
        "create": (POST, "/create_sampling_session"),
        "get_base_model": (GET, "/samplers/{sampler}"),
        "get_tokenizer": None,
        "get_sampler_handle": None,
        "from_sampler_handle": None,
    },
    "RestClient": {
        "get_server_capabilities": (GET, "/get_server_capabilities"),
        "get_training_run": (GET, "/training_runs/{run}"),
        "get_training_run_by_tinker_path": (GET, "/training_runs/{run}"),
        "list_training_runs": (GET, "/training_runs"),
        "get_weights_info_by_tinker_path": (POST, "/weights_info"),
        "list_checkpoints": (GET, "/training_runs/{run}/checkpoints"),
        "list_user_checkpoints": (GET, "/checkpoints"),
        "delete_checkpoint": (DELETE, _CHECKPOINT),
        "delete_checkpoint_from_tinker_path": (DELETE, _CHECKPOINT),
        "set_checkpoint_ttl_from_tinker_path": (PUT, f"{_CHECKPOINT}/ttl"),
        "get_session": (GET, "/sessions/{session}"),
        "list_sessions": (GET, "/sessions"),
        "get_sampler": (GET, "/samplers/{sampler}"),
        "get_external_weights_urls": (GET, f"{_CHECKPOINT}/external_weights_urls"),
        "copy_weights": (POST, "/copy_weights"),
        "publish_checkpoint_from_tinker_path": (POST, f"{_CHECKPOINT}/publish"),
        "unpublish_checkpoint_from_tinker_path": (DELETE, f"{_CHECKPOINT}/publish"),
        "assign_session_project": (PUT, "/sessions/{session}/project"),
        "search_sessions": (POST, "/sessions/search"),
        "export_session_trace": (GET, "/sessions/{session}/trace_export"),
        "get_audit_log": (GET, "/audit"),
        "get_billing_usage": (GET, "/billing/usage/events"),
        "get_current_checkpoint_storage_usage": (GET, "/billing/usage/checkpoints/current"),
        "whoami": (POST, "/auth/token"),
    },
}
LOCAL = {"get_console_url", "get_telemetry", "on_queue_state_change"}
"""Methods that show a page of Tinker's, or are the SDK's own."""


def table() -> str:
    """The page's table: methods that work, and the answer to each of the others."""
    lines = ["| client | method | |", "|---|---|---|"]
    for client, methods in METHODS.items():
        works = [name for name, route in methods.items() if route is None or route in ROUTES]
        lines.append(f"| `{client}` | {', '.join(f'`{name}`' for name in works)} | work |")
        for name, route in methods.items():
            if name not in works:
                assert route is not None
                lines.append(f"| | `{name}` | {UNSUPPORTED[route]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
