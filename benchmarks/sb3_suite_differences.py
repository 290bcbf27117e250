"""Why tests of Stable-Baselines3 do not pass on unidle.sb3: a part of a test's name → the reason.

The first that fits a failed test is its reason: why it stops where it does. What it checks after that is not reached.
"""

_ERROR = "the same mistake is refused, as a UsageError with the way out, not an AssertionError"
_NOISE = "`action_noise` is for TD3, and its kind is NormalActionNoise with one sigma"
_BUFFER = "the replay buffer's arrays cannot be read or replaced; its size can, and it can be saved and loaded"
_IMAGES = "`normalize_images=False` is refused: a CNN reads uint8 images, which are scaled"
_TRAIN = "there is no `train`: updates are part of unidle's loop"

DIFFERENCES: dict[str, str] = {
    "test_identity::test_discrete[env2-PPO]": (
        "unseeded episodes against a threshold after 1,200 steps, which SB3 misses in some runs too"
    ),
    "test_save_load::test_set_env[": "`_last_obs` is private; the environment's state is inside the run",
    "test_save_load_replay_buffer": _BUFFER,
    "test_warn_buffer": "`handle_timeout_termination=False` is refused: truncated episodes are always bootstrapped",
    "test_load_invalid_object": "the file is unidle's own zip, which has no pickled objects to damage",
    "test_dqn_target_update_interval": "the interval is a whole number of updates: 96 steps instead of 100",
    "test_cast_lr_schedule": "functions are not saved; a warning says to pass them to load again",
    "test_save_load_no_target_params": "the warning is for zips of SB3 before 2.4; unidle writes its own",
    "test_save_load_backward_compatible": "functions are not saved; a warning says to pass them to load again",
    "test_save_load_clip_range_portable": "model.clip_range is the number that was given, not an object of SB3's",
    "test_callbacks::test_callbacks[PPO]": "a callback that stops training does so at the end of the iteration",
    "test_callbacks_can_cancel_runs": "a replay buffer of 1 transition is refused; it must hold two iterations",
    "test_eval_callback_logs_are_written": "events are in a folder of the run folder, at the end of the iteration",
    "test_vecenv_dict_spaces[SubprocVecEnv]": "actions are an array; no algorithm has Dict or Tuple actions",
    "test_vecenv_tuple_spaces[SubprocVecEnv]": "actions are an array; no algorithm has Dict or Tuple actions",
    "test_dqn_train_with_batch_norm": "`tau` must be above 0",
    "test_td3_train_with_batch_norm": "`tau` must be above 0",
    "test_sac_train_with_batch_norm": "`tau` must be above 0",
    "test_train_eval_mode": "features extractors with BatchNorm or Dropout are refused",
    "test_deterministic_pg": _NOISE,
    "test_ppo[-0.2": "a negative clip_range_vf means no clipping, as in rl-zoo",
    "test_train_freq[train_freq2]": "`train_freq` in episodes is refused: learning follows a fixed number of steps",
    "test_offpolicy_multi_env[SAC]": _NOISE,
    "test_warn_dqn_multi_env": "no warning: the interval counts steps of all environments, and is honoured",
    "test_ppo_warnings": _ERROR,
    "test_deterministic_training_common[SAC]": _NOISE,
    "test_policy_hint[MlpPolicy]": "MlpPolicy takes Dict observations",
    "test_dict_nested": "nested Dict observations are supported",
    "test_cnn::test_cnn[False-PPO]": "PPO's actor and critic share the CNN",
    "test_cnn::test_cnn[": "images with channels last are read as they are, without a VecTransposeImage around them",
    "test_features_extractor_target_net[False": _TRAIN,
    "test_features_extractor_target_net": "`share_features_extractor=True` is refused",
    "test_image_like_input": _IMAGES,
    "test_action_spaces[CartPole-v1-SAC]": "SAC takes Discrete actions",
    "test_action_spaces": _ERROR,
}
